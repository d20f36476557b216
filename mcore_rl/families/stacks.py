"""Tensors of a checkpoint that have the experts of a layer as their first dimension, and the tables' tensors in them.

The tables speak of one matrix of one expert, ``[outputs, inputs]``, as most checkpoints have it.  Checkpoints of newer
classes of transformers stack the experts of a layer, fuse the gate with the other half of the gated MLP (one after
another, or row by row in turns), and some keep matrices as ``[inputs, outputs]``.  A ``Stack`` says so, once; files are
read and written through it (``checkpoints/stacked.py``), and the proofs number what is in the files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mcore_rl.config.model import ModelConfig
from mcore_rl.families.rules import HfTensor, num_experts


@dataclass(frozen=True)
class Stack:
    """A stored tensor ``[experts, ...]``.

    name: in the files, with ``{l}``.  holds: the tables' tensors in the slab of one expert, by names with ``{l}`` and
    ``{e}``; all have one shape.  in_turns: they take turns, output by output; else one follows the other.  transposed:
    the slab is ``[inputs, outputs]``.
    """

    name: str
    holds: tuple[HfTensor, ...]
    in_turns: bool = False
    transposed: bool = False

    def shape(self, model: ModelConfig) -> tuple[int, ...]:
        """The shape of the stored tensor."""
        outputs, *inputs = self.holds[0].shape(model)
        slab = (len(self.holds) * outputs, *inputs)
        return (num_experts(model), *(reversed(slab) if self.transposed else slab))


@dataclass(frozen=True)
class StackedPart:
    """One tensor of the tables within a stored one.

    stored: the stored tensor's name.  expert: the slab.  place: number within the slab.  size: its outputs.
    """

    stack: Stack
    stored: str
    expert: int
    place: int
    size: int

    @property
    def dim_of_outputs(self) -> int:
        """The dimension of a slab that runs over the outputs."""
        return int(self.stack.transposed and len(self.stack.holds[0].dims) == 2)

    def outputs(self, begin: int, count: int) -> range:
        """The numbers, among the outputs of the slab, of ``count`` outputs of the part from ``begin`` on."""
        if not self.stack.in_turns:
            first = self.place * self.size + begin
            return range(first, first + count)
        turns = len(self.stack.holds)
        first = self.place + turns * begin
        return range(first, first + turns * (count - 1) + 1, turns)

    @property
    def rows(self) -> slice:
        """The outputs of the slab that are the part's."""
        outputs = self.outputs(0, self.size)
        return slice(outputs.start, outputs.stop, outputs.step)

    def within(self, slab: Any) -> Any:
        """The part's view of the ``slab`` of its expert, an array of numpy or torch."""
        return (slab.swapaxes(-1, -2) if self.dim_of_outputs else slab)[self.rows]


def stacked_parts(stacks: Iterable[Stack], model: ModelConfig) -> dict[str, StackedPart]:
    """The tables' name of each tensor in a stack -> where it is, for all layers with experts of ``model``."""
    return {name: part for stack in stacks for name, part in _parts(stack, model)}


def _parts(stack: Stack, model: ModelConfig) -> Iterator[tuple[str, StackedPart]]:
    for layer in filter(model.has_experts, range(model.num_layers)):
        for expert in range(num_experts(model)):
            for place, tensor in enumerate(stack.holds):
                part = StackedPart(stack, stack.name.format(l=layer), expert, place, tensor.shape(model)[0])
                yield tensor.name.format(l=layer, e=expert), part


def stored_shapes(
    shapes: Mapping[str, tuple[int, ...]], parts: Mapping[str, StackedPart], model: ModelConfig
) -> dict[str, tuple[int, ...]]:
    """Names and shapes in the files of the tables' tensors ``shapes``, in their order."""
    stored: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        part = parts.get(name)
        stored[name if part is None else part.stored] = shape if part is None else part.stack.shape(model)
    return stored
