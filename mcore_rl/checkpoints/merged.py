"""A model on disk merged with adapters, ``W + scale * B A``, read window by window as Hugging Face tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from mcore_rl.checkpoints.hf_directory import HfCheckpoint
from mcore_rl.checkpoints.safetensors import TensorSpec
from mcore_rl.errors import CheckpointError
from mcore_rl.weights.adapter_table import PEFT
from mcore_rl.weights.table import Table
from mcore_rl.weights.tensor_slice import TensorSlice
from mcore_rl.weights.views import view_of


class MergedWeights:
    """The tensors of ``base``, of which those with ``adapters`` are merged with them in float32, and then cast.

    sidecar_directory: has config.json and the tokenizer.  base_directory: of ``base``.
    """

    def __init__(
        self,
        base: HfCheckpoint,
        table: Table,
        adapters: Mapping[str, Tensor],
        scale: float,
        sidecar_directory: Path | None = None,
    ) -> None:
        """adapters: whole, by their names in PEFT's files; a tensor of ``table`` itself, a value head, takes its place.

        sidecar_directory: None is that of ``base``.

        Raises CheckpointError with every adapter that has no partner, or not of a shape that fits the model's tensor.
        """
        self.table, self._base, self._scale = table, base, scale
        self.sidecar_directory = sidecar_directory or base.directory
        self.base_directory = base.directory
        self._pairs = {
            name: (adapters[_name(name, "A")], adapters[_name(name, "B")])
            for name in table.hf_tensors
            if _name(name, "A") in adapters and _name(name, "B") in adapters
        }
        self._whole = {name: adapters[name] for name in table.hf_tensors if name in adapters}
        known = {_name(name, which) for name in self._pairs for which in "AB"} | self._whole.keys()
        problems = [f"tensor {name} is of no layer of the model, or alone" for name in adapters.keys() - known]
        for name, (a, b) in self._pairs.items():
            rows, columns = table.hf_tensors[name].shape
            if (b.shape[0], a.shape[1]) != (rows, columns) or a.shape[0] != b.shape[1]:
                shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
                problems.append(f"adapters of {name} have shapes {shapes}, for {rows, columns}")
        for name, tensor in self._whole.items():
            if tensor.shape != table.hf_tensors[name].shape:
                problems.append(f"{name} has shape {tuple(tensor.shape)}, for {table.hf_tensors[name].shape}")
        if problems:
            remedy = (
                "Give adapters of this model; of its embedding, or of an output projection tied to it, PEFT merges them"
            )
            raise CheckpointError(str(base.directory), [f"{each}. {remedy} (docs/lora.md)" for each in problems])
        held = {name: base.tensors[name] for name in table.hf_tensors if name in base.tensors}
        specs = {name: TensorSpec(name, info.dtype, info.shape) for name, info in held.items()}
        dtype = next(iter(specs.values())).dtype
        specs |= {name: TensorSpec(name, dtype, tuple(tensor.shape)) for name, tensor in self._whole.items()}
        self.tensors: Mapping[str, TensorSpec] = MappingProxyType(specs)

    def read_into(self, name: str, region: TensorSlice, out: Tensor) -> None:
        """Copy ``region`` of tensor ``name`` into ``out``, of the region's shape; cast."""
        if name in self._whole:
            out.copy_(view_of(self._whole[name], region))
            return
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
