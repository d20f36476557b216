"""The adapters inside a running vLLM worker: written in place, into the memory that its kernels and graphs know.

vLLM 0.32 (lora/layers) keeps, for each linear layer that may have adapters, an A and a B for every linear that is
fused in it: ``[slots, 1, held rank, inputs]`` and ``[slots, 1, outputs, held rank]``.  It would fill a slot from files,
through copies on the host; here it gives our adapter a slot without any, and updates write there.  What lies beyond the
adapter's rank, and layers without adapters, stay zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights

from mcore_rl.ground.errors import WeightMapError
from mcore_rl.weights.rollout_adapters import RolloutAdapterTable
from mcore_rl.weights.tensor_slice import TensorSlice
from mcore_rl.weights.views import view_of


class LiveAdapters:
    """The adapters of one worker: the tensors of rollout rank ``rank`` in ``table``.

    manager: vLLM's, of the worker's model.
    Raises WeightMapError with every tensor for which vLLM has no memory, or of another shape.
    """

    def __init__(self, manager: Any, table: RolloutAdapterTable, rank: int) -> None:
        self.table = table
        self.stored = {tensor.name: tensor for tensor in table.tensors(rank)}
        slot = _own_slot(manager, table.adapter, table.lora.rank)
        self.places: dict[str, Tensor] = {}
        problems = []
        for name, stored in self.stored.items():
            module, which, source = stored.parameter.rsplit(".", 2)
            held = _memory(manager.modules.get(module), which, int(source), slot)
            problem = _problem(held, table.shape(stored), which)
            if held is None or problem is not None:
                problems.append(f"{name}: {problem}. Start vLLM with the adapters and the layout of the table")
                continue
            self.places[name] = view_of(held, TensorSlice.whole(table.shape(stored)))
        if problems:
            raise WeightMapError(f"adapters of {table.family.name}, rollout rank {rank} of {table.layout}", problems)
        self._left: dict[str, int] = {}

    def start(self) -> None:
        """Expect every element of every tensor once."""
        self._left = {name: prod(self.table.shape(stored)) for name, stored in self.stored.items()}

    @torch.no_grad()
    def write(self, name: str, slot: int | None, region: TensorSlice, values: Tensor) -> None:
        """Write ``values`` to ``region`` of a tensor; each element once."""
        assert slot is None, "no adapter is stacked"
        view_of(self.places[name], region).copy_(values)
        self._left[name] -= values.numel()
        assert self._left[name] >= 0, f"{name} was written twice"

    def unwritten(self) -> list[str]:
        """Names of the tensors of which something is missing."""
        return [name for name, left in self._left.items() if left]

    def executed(self) -> Iterator[tuple[str, int | None, Iterator[tuple[tuple[int, ...], Tensor]]]]:
        """As ``LiveWeights.executed``: (name, None, one part) of every tensor."""
        for name, tensor in self.places.items():
            yield name, None, iter([((0, 0), tensor)])


def _own_slot(manager: Any, adapter: int, rank: int) -> int:
    """The slot of ``adapter``, which vLLM is given without any tensors if it does not know it yet."""
    if adapter not in manager.list_adapters():
        nothing = LoRALayerWeights("no layer's", rank, rank, torch.zeros(1, 1), torch.zeros(1, 1))  # vLLM looks at one
        manager.add_adapter(LoRAModel(adapter, rank, {nothing.module_name: nothing}))
    manager.activate_adapter(adapter)
    manager.pin_adapter(adapter)  # so that no other one takes its slot
    slot: int = manager.lora_index_to_id.index(adapter)
    return slot


def _memory(layer: Any, which: str, source: int, slot: int) -> Tensor | None:
    """A or B (``which``) of linear ``source`` of a fused layer; None: it has no such memory."""
    if layer is None:
        return None
    stacked = {"lora_A": layer.lora_a_stacked, "lora_B": layer.lora_b_stacked}[which]
    return stacked[source][slot, 0] if source < len(stacked) else None


def _problem(held: Tensor | None, shape: tuple[int, ...], which: str) -> str | None:
    if held is None:
        return "vLLM has no memory for it"
    rows, columns = shape
    held_rows, held_columns = held.shape
    fits = (
        (held_rows >= rows, held_columns == columns)
        if which == "lora_A"
        else (held_rows == rows, held_columns >= columns)
    )
    return None if all(fits) else f"is of shape {shape}, and vLLM's memory of {tuple(held.shape)}"
