"""A model on disk merged with adapters, ``W + scale * B A``, read window by window as Hugging Face tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from mcore_rl.checkpoints.hf_directory import HfCheckpoint
from mcore_rl.checkpoints.peft import open_adapters
from mcore_rl.checkpoints.safetensors import TensorSpec
from mcore_rl.errors import CheckpointError
from mcore_rl.weights.adapter_table import PEFT
from mcore_rl.weights.table import Table
from mcore_rl.weights.tensor_slice import TensorSlice


class MergedWeights:
    """The tensors of ``base``, of which those with ``adapters`` are merged with them in float32, and then cast.

    sidecar_directory: has config.json and the tokenizer.
    """

    def __init__(self, base: HfCheckpoint, table: Table, adapters: Mapping[str, Tensor], scale: float) -> None:
        """adapters: whole, by their names in PEFT's files.

        Raises CheckpointError with every adapter that has no partner, or not of a shape that fits the model's tensor.
        """
        self.table, self.sidecar_directory, self._base, self._scale = table, base.directory, base, scale
        self._pairs = {
            name: (adapters[_name(name, "A")], adapters[_name(name, "B")])
            for name in table.hf_tensors
            if _name(name, "A") in adapters and _name(name, "B") in adapters
        }
        known = {_name(name, which) for name in self._pairs for which in "AB"}
        problems = [f"tensor {name} is of no layer of the model, or alone" for name in adapters.keys() - known]
        for name, (a, b) in self._pairs.items():
            rows, columns = table.hf_tensors[name].shape
            if (b.shape[0], a.shape[1]) != (rows, columns) or a.shape[0] != b.shape[1]:
                shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
                problems.append(f"adapters of {name} have shapes {shapes}, for {rows, columns}")
        if problems:
            raise CheckpointError(str(base.directory), [f"{each}. Give adapters of this model" for each in problems])
        held = {name: base.tensors[name] for name in table.hf_tensors if name in base.tensors}
        self.tensors: Mapping[str, TensorSpec] = MappingProxyType(
            {name: TensorSpec(name, info.dtype, info.shape) for name, info in held.items()}
        )

    def read_into(self, name: str, region: TensorSlice, out: Tensor) -> None:
        """Copy ``region`` of tensor ``name`` into ``out``, of the region's shape; cast."""
        if name not in self._pairs:
            self._base.read_into(name, region, out)
            return
        (rows, columns), (height, width) = region.start, region.shape
        a, b = self._pairs[name]
        merged = torch.empty(region.shape, dtype=torch.float32)
        self._base.read_into(name, region, merged)
        change = b[rows : rows + height].float() @ a[:, columns : columns + width].float()
        out.copy_(merged.add_(change, alpha=self._scale))

    def damage(self, progress: Callable[[int, int], None]) -> list[str]:
        """Nothing says how the files were; ``progress`` is told that they were seen."""
        progress(1, 1)
        return []

    def close(self) -> None:
        """Close the files."""
        self._base.close()


def _name(weight: str, which: str) -> str:
    return f"{PEFT}{weight.removesuffix('.weight')}.lora_{which}.weight"


def read_adapters(directory: Path) -> dict[str, Tensor]:
    """All tensors of a directory that PEFT saved."""
    with open_adapters(directory) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.tensors}
