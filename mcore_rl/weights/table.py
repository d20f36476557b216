"""A family's table for one model and one parallel layout: the tensors of each rank, and what they are made of.

Integers and names only; nothing is read, sent or built.  Loading, exporting, checkpoints and the proofs all read it.

Invariant: ``tensors(rank)`` names every tensor that the Megatron modules of ``rank`` have, once; over the ranks of one
replica every element of every name in ``hf_tensors`` is held.  ``proofs/verify.py`` proves both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.config.role import Head
from mcore_rl.families.blocks import VALUE_HEAD
from mcore_rl.families.family import Family
from mcore_rl.families.rules import Axis, Rule, ShardRanges, Stage, num_experts
from mcore_rl.parallel.layout import Coords, Layout, place_layers
from mcore_rl.weights.names import canonical
from mcore_rl.weights.tensor_slice import TensorSlice


@dataclass(frozen=True, slots=True)
class Piece:
    """An equal-shaped part of a Hugging Face tensor and of a local one.

    hf: the tensor's name.  hf_start, local_start: first index per dimension.  shape: of the part.
    """

    hf: str
    hf_start: tuple[int, ...]
    local_start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def hf_region(self) -> TensorSlice:
        """The part of the Hugging Face tensor."""
        return TensorSlice(self.hf_start, self.shape)

    @property
    def local_region(self) -> TensorSlice:
        """The part of the local tensor."""
        return TensorSlice(self.local_start, self.shape)


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """A tensor of one rank.

    name: canonical (``weights/names.py``), within its model chunk.  chunk: which of the rank's model chunks.  layer,
    expert: in the whole model, the layer or the block of the vision tower; None for a tensor outside them.
    num_shards, index: shard ``index`` of ``num_shards`` along the rule's axis.
    """

    name: str
    chunk: int
    rule: Rule
    layer: int | None
    expert: int | None
    num_shards: int
    index: int

    @property
    def hf_names(self) -> tuple[str, ...]:
        """The Hugging Face tensors that this tensor holds parts of."""
        return tuple(tensor.name.format(l=self.layer, e=self.expert) for tensor in self.rule.hf)


@dataclass(frozen=True, slots=True)
class HfInfo:
    """A tensor that a checkpoint must hold.

    dtype: torch's name; None: the model's dtype.  absent_ok: whether the checkpoint may lack the tensor.
    """

    shape: tuple[int, ...]
    dtype: str | None
    absent_ok: bool


def pieces(
    rule: Rule, model: ModelConfig, shard: ShardRanges, layer: int | None = None, expert: int | None = None
) -> list[Piece]:
    """The parts of a local tensor of ``rule`` that holds ``shard``, in order; the rest is padding."""
    dim = rule.dim
    parts = []
    offset = 0
    for held in shard.ranges:
        tensor = rule.hf[held.source]
        shape = list(tensor.shape(model))
        hf_start = [0] * len(shape)
        local_start = [0] * len(shape)
        hf_start[dim] = held.begin
        local_start[dim] = offset
        shape[dim] = held.end - held.begin
        offset += shape[dim]
        name = tensor.name.format(l=layer, e=expert)
        parts.append(Piece(name, tuple(hf_start), tuple(local_start), tuple(shape)))
    return parts


class Table:
    """The tensors of every rank of ``parallel`` over ``world_size`` processes (None: one replica).

    head: a value head, or nothing, replaces the output projection.
    Raises ConfigError if the layout does not fit the world.
    """

    def __init__(
        self,
        family: Family,
        model: ModelConfig,
        parallel: ParallelConfig | None = None,
        world_size: int | None = None,
        *,
        head: Head = Head.lm,
    ) -> None:
        self.family = family
        self.model = model
        self.parallel = parallel or ParallelConfig()
        replica = self.parallel.tp * self.parallel.pp * self.parallel.cp
        self.layout = Layout.of(self.parallel, replica if world_size is None else world_size)
        self.head = head
        self.placement = place_layers(model.num_layers, self.parallel)
        rules = family.weights
        if head is not Head.lm:
            rules = tuple(rule for rule in rules if rule.name != VALUE_HEAD.name)
            rules += (VALUE_HEAD,) if head is Head.value else ()
        self.rules = tuple(rule for rule in rules if rule.only(model))
        for rule in self.rules:
            assert rule.turn == (0, 1), f"{rule.name}: Megatron has the gate before the other half"
        self._shards: dict[tuple[Rule, int, int], ShardRanges] = {}

    def canonical(self, key: str) -> str | None:
        """The name in this table of a state dict's ``key``; None if the table does not speak of it."""
        return canonical(key)

    def tensors(self, rank: int) -> list[LocalTensor]:
        """Every tensor of ``rank``, in the order of its chunks and layers."""
        coords = self.layout.coords(rank)
        tensors = []
        for chunk in range(self.parallel.vpp):
            place = chunk * self.parallel.pp + coords.pp
            layers = self.placement[place]
            first = place == 0
            last = place == len(self.placement) - 1
            here = {Stage.first: first, Stage.last: last, Stage.last_copy: last and not first}
            tensors += [self._local(rule, chunk, coords) for rule in self.rules if here.get(rule.stage)]
            if first:
                tensors += self._of_tower(chunk, coords)
            for layer in layers:
                for rule in self.rules:
                    if rule.stage is Stage.layer and rule.applies_to(self.model, layer):
                        tensors += self._of_layer(rule, chunk, layer, layers[0], coords)
        return tensors

    def _of_layer(self, rule: Rule, chunk: int, layer: int, first_layer: int, coords: Coords) -> list[LocalTensor]:
        local = self._local(rule, chunk, coords)
        if not rule.per_expert:
            return [replace(local, name=rule.name.format(l=layer - first_layer, e=None), layer=layer)]
        first = coords.ep * self.experts_per_rank
        return [
            replace(local, name=rule.name.format(l=layer - first_layer, e=e), layer=layer, expert=first + e)
            for e in range(self.experts_per_rank)
        ]

    def _of_tower(self, chunk: int, coords: Coords) -> Iterator[LocalTensor]:
        for rule in self.rules:
            if rule.stage is Stage.tower:
                local = self._local(rule, chunk, coords)
                for block in rule.layers_of(self.model):
                    yield replace(local, name=rule.name.format(l=block), layer=block)

    def _local(self, rule: Rule, chunk: int, coords: Coords) -> LocalTensor:
        index = {Axis.none: 0, Axis.tensor: coords.tp, Axis.expert_tensor: coords.etp}[rule.axis]
        return LocalTensor(rule.name, chunk, rule, None, None, self.num_shards(rule), index)

    def num_shards(self, rule: Rule) -> int:
        """Number of ranks that a tensor of ``rule`` is split over."""
        return {Axis.none: 1, Axis.tensor: self.layout.tp, Axis.expert_tensor: self.layout.etp}[rule.axis]

    @property
    def experts_per_rank(self) -> int:
        """Experts of a layer that one rank holds, whole or in shards."""
        return num_experts(self.model) // self.layout.ep

    def shard(self, local: LocalTensor) -> ShardRanges:
        """The split dimension of ``local``."""
        key = (local.rule, local.num_shards, local.index)
        if key not in self._shards:
            self._shards[key] = local.rule.shard(self.model, local.num_shards, local.index)
        return self._shards[key]

    def shape(self, local: LocalTensor) -> tuple[int, ...]:
        """The shape of ``local``."""
        shape = list(local.rule.hf[0].shape(self.model))
        shape[local.rule.dim] = self.shard(local).size
        return tuple(shape)

    def pieces(self, local: LocalTensor) -> list[Piece]:
        """The parts of Hugging Face tensors that ``local`` is made of; the rest is padding, which is zero."""
        return pieces(local.rule, self.model, self.shard(local), local.layer, local.expert)

    @cached_property
    def hf_tensors(self) -> dict[str, HfInfo]:
        """Every Hugging Face tensor of the model, in the order of the layers."""
        infos: dict[str, HfInfo] = {}
        for rule, layer, expert in self._places():
            for tensor in rule.hf:
                info = HfInfo(tensor.shape(self.model), rule.dtype, rule.absent_ok)
                infos[tensor.name.format(l=layer, e=expert)] = info
        return infos

    def _places(self) -> Iterator[tuple[Rule, int | None, int | None]]:
        """(rule, layer, expert) of the whole model: the first stage, the tower, the layers, the last stage."""
        for stage in (Stage.first, Stage.tower):
            of_stage = [rule for rule in self.rules if rule.stage is stage]
            yield from ((rule, number, None) for rule in of_stage for number in rule.layers_of(self.model))
        for layer in range(self.model.num_layers):
            for rule in self.rules:
                if rule.stage is Stage.layer and rule.applies_to(self.model, layer):
                    yield from ((rule, layer, expert) for expert in self._experts_of(rule))
        yield from ((rule, None, None) for rule in self.rules if rule.stage is Stage.last)

    def _experts_of(self, rule: Rule) -> list[int | None]:
        return [*range(num_experts(self.model))] if rule.per_expert else [None]
