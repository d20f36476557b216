"""The weights in a run's checkpoint, read as Hugging Face tensors.

A checkpoint stores the main weights in float32; reading casts them.  In the dtype that the run trained in, they are the
live weights, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from mcore_rl.checkpoints.manifest import MANIFEST, damage
from mcore_rl.checkpoints.rank_state import MAIN, SIDECAR_FILES, WEIGHT, state_file
from mcore_rl.checkpoints.safetensors import TensorSpec
from mcore_rl.checkpoints.stored_state import StoredState
from mcore_rl.config.lora import LoraConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.errors import CheckpointError
from mcore_rl.families.family import Family
from mcore_rl.weights.adapter_table import AdapterTable
from mcore_rl.weights.table import Table
from mcore_rl.weights.tensor_slice import TensorSlice

ACTOR = "actor"


def role_directory(directory: Path) -> Path | None:
    """The directory of the ranks' files: ``directory`` or its ``actor``; None if it is no run's checkpoint."""
    return next((place for place in (directory, directory / ACTOR) if state_file(place, 0).exists()), None)


class RunWeights:
    """The weights of one role of a checkpoint.

    tensors: in the order of the layers, in the dtype that was trained.  sidecar_directory: has config.json and the
    tokenizer.
    """

    def __init__(self, directory: Path, family: Family, model: ModelConfig, lora: LoraConfig | None = None) -> None:
        """directory: of a role, as ``role_directory`` finds it.  lora: the adapters, of a run that trained these.

        Raises CheckpointError with every violation: a file that is missing or damaged; a tensor that is missing, that
        ``model`` does not have, or that has another shape.
        """
        self.sidecar_directory = directory / SIDECAR_FILES
        self._stored = StoredState.open(directory)
        state = self._stored.ranks[0]
        weights = Table(family, model, head=state.head)
        self.table = AdapterTable(weights, lora) if lora else weights
        shapes = {name: info.shape for name, info in self.table.hf_tensors.items()}
        problems = list(self._stored.mismatches(shapes))
        specs: dict[str, TensorSpec] = {}
        for name, info in self.table.hf_tensors.items():
            if problem := self._stored.missing(self._kind(name), name, TensorSlice.whole(info.shape)):
                problems.append(problem)
            specs[name] = TensorSpec(name, getattr(torch, info.dtype or state.dtype), info.shape)
        if problems:
            raise CheckpointError(str(directory), problems)
        self.tensors: Mapping[str, TensorSpec] = MappingProxyType(specs)

    def read_into(self, name: str, region: TensorSlice, out: Tensor) -> None:
        """Copy ``region`` of Hugging Face tensor ``name`` into ``out``, of the region's shape; cast."""
        self._stored.read_into(self._kind(name), name, region, out)

    def damage(self, progress: Callable[[int, int], None]) -> list[str]:
        """The damaged files, by the checkpoint's manifest.  progress: called with (bytes just read, bytes in all)."""
        directory = self._stored.directory
        if not (directory.parent / MANIFEST).exists():
            return [f"there is no {MANIFEST} beside the directory, so that nothing says whether it is whole"]
        problems = damage(directory.parent, only=directory.name)
        size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
        progress(size, size)
        return problems

    def close(self) -> None:
        """Close the files."""
        self._stored.close()

    def _kind(self, name: str) -> str:
        return MAIN if self._stored.holds(MAIN, name) else WEIGHT
