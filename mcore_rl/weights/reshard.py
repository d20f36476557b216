"""The reshard plan: which part of which training rank's tensor goes to which part of which rollout rank's tensor.

Made once, from a family's two tables, in integers; nothing is sent here, and nothing but numpy is needed.  Rows are
columns of int32, and all layers, experts and replicas that split a tensor alike share one list of regions, so a plan
for hundreds of billions of parameters on hundreds of ranks takes seconds and a few hundred megabytes.

Where several ranks hold the same source (data-parallel copies; tensors that tensor ranks replicate; the tied embedding
of the last pipeline stage), they share the sending.  Where it is known on which nodes the ranks are
(``Sites``), a rank sends to its own device and node first, and what must come from another node comes there once: see
``weights/senders.py``.

Invariant, proven by ``proofs/reshard_proof.py``: every element that a rollout rank stores, padding apart, is written
by exactly one copy, from the element of the same Hugging Face tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mcore_rl.config.model import ModelConfig
from mcore_rl.families.rules import Axis, Rule, Stage
from mcore_rl.ground.arrays import Int32Array, Int64Array
from mcore_rl.weights.rollout_table import RolloutTable, itemsize_of
from mcore_rl.weights.senders import RowColumns, grouped, senders
from mcore_rl.weights.sites import Sites
from mcore_rl.weights.table import Piece, Table, pieces
from mcore_rl.weights.tensor_slice import TensorSlice


class Replicas:
    """Sets of training ranks that hold the same tensors; a tied embedding's last stage belongs to the set of its first.

    members: the ranks of each set, ascending; sets are distinct, and numbered in the order in which they are looked up.
    """

    def __init__(self, table: Table) -> None:
        self.table = table
        at = [table.layout.coords(rank) for rank in range(table.layout.world_size)]
        self.pp, self.ep, self.tp, self.etp = np.array([(c.pp, c.ep, c.tp, c.etp) for c in at]).T
        self._place_of = {layer: place for place, layers in enumerate(table.placement) for layer in layers}
        self._copies = {rule.hf: rule for rule in table.rules if rule.stage is Stage.last_copy}
        self.members: list[Int64Array] = []
        self._known: dict[bytes, int] = {}

    def shard_index(self, rule: Rule) -> Int64Array:
        """The shard of ``rule`` that each rank would hold: int64 [ranks]."""
        by_axis: dict[Axis, Int64Array] = {
            Axis.none: np.zeros_like(self.tp),
            Axis.tensor: self.tp,
            Axis.expert_tensor: self.etp,
        }
        return by_axis[rule.axis]

    def stages(self, rule: Rule, layer: int | None) -> tuple[int, ...]:
        """Pipeline stages that hold the tensor of ``rule`` in ``layer``."""
        last = self.table.layout.pp - 1
        if rule.stage is Stage.layer:
            assert layer is not None, f"{rule.name} lives in a layer"
            return (self._place_of[layer] % (last + 1),)
        if rule.stage is Stage.tower:
            return (0,)
        if rule.stage is Stage.first:
            return (0, last) if rule.hf in self._copies and last else (0,)
        return (last,)

    def sets(self, rule: Rule, shard: int, layers: list[int | None]) -> Int32Array:
        """The set that holds shard ``shard`` of ``rule``: [layers, experts (1 where it has none)]."""
        mine = self.shard_index(rule) == shard
        ep_ranks = range(self.table.layout.ep if rule.per_expert else 1)
        stages = [self.stages(rule, layer) for layer in layers]
        by_stage = {
            stage: [
                self._number(mine & np.isin(self.pp, stage) & (self.ep == ep if rule.per_expert else True))
                for ep in ep_ranks
            ]
            for stage in set(stages)
        }
        sets = np.array([by_stage[stage] for stage in stages], dtype=np.int32)
        return np.repeat(sets, self.table.experts_per_rank, axis=1) if rule.per_expert else sets

    def _number(self, mask: NDArray[np.bool_]) -> int:
        members = np.flatnonzero(mask)
        number = self._known.setdefault(members.tobytes(), len(self.members))
        if number == len(self.members):
            self.members.append(members)
        return number

    def local_name(self, rule: Rule, layer: int, expert: int, rank: int) -> tuple[int, str]:
        """(model chunk, canonical name) of a tensor on ``rank``; layer and expert are 0 for a tensor without them."""
        if rule.stage is Stage.layer:
            place = self._place_of[layer]
            number = layer - self.table.placement[place][0]
            local = expert - int(self.ep[rank]) * self.table.experts_per_rank if rule.per_expert else None
            return place // self.table.layout.pp, rule.name.format(l=number, e=local)
        if rule.stage is Stage.tower:
            return 0, rule.name.format(l=layer)
        if rule.stage is Stage.first and self.pp[rank] != 0:
            rule = self._copies[rule.hf]
        return 0 if rule.stage is Stage.first else self.table.layout.vpp - 1, rule.name


class TensorIds:
    """Numbers the tensors of ``rules``: rule by rule, layer by layer, expert by expert."""

    def __init__(self, rules: Sequence[Rule], model: ModelConfig) -> None:
        self._in_layer = np.array([rule.stage is Stage.layer for rule in rules])
        # The place of a rule outside the layers.
        before = (Stage.first, Stage.tower)
        self._place = np.array([-1 if rule.stage in before else model.num_layers for rule in rules])
        self._per_expert = np.array([rule.per_expert for rule in rules])
        num_experts = 1 if model.moe is None else model.moe.num_experts
        self._experts = np.where(self._per_expert, num_experts, 1)
        numbered = {Stage.layer: model.num_layers, Stage.tower: 0 if model.vision is None else model.vision.depth}
        sizes = np.array([numbered.get(rule.stage, 1) for rule in rules], dtype=np.int64) * self._experts
        self._starts = np.concatenate([[0], np.cumsum(sizes)])
        assert self._starts[-1] < 2**31, "more tensors than 32 bits number"

    def __len__(self) -> int:
        return int(self._starts[-1])

    def encode(self, rule: int, layers: NDArray[np.integer], experts: NDArray[np.integer]) -> Int32Array:
        """Ids of tensors of rule number ``rule``; layer and expert are 0 for a tensor without them."""
        numbers: Int32Array = (self._starts[rule] + layers * self._experts[rule] + experts).astype(np.int32)
        return numbers

    def decode(self, ids: Int32Array) -> tuple[Int32Array, Int32Array, Int32Array]:
        """(rule, layer, expert) of each id; 0 for a tensor without layer or expert."""
        rule = np.searchsorted(self._starts, ids, side="right").astype(np.int32) - 1
        layer, expert = np.divmod(ids - self._starts[rule], self._experts[rule])
        return rule, layer.astype(np.int32), expert.astype(np.int32)

    def places(self, ids: Int32Array) -> Int32Array:
        """The place of each in the model: -1 before the layers, its layer, or the number of layers behind them."""
        rule, layer, _ = self.decode(ids)
        return np.where(self._in_layer[rule], layer, self._place[rule]).astype(np.int32)


@dataclass(frozen=True, slots=True)
class Geometry:
    """The regions that a source shard sends to a target shard; the same for all layers, experts and ranks.

    source_rule, target_rule: indices into ``Table.rules`` and ``RolloutTable.rules``.  source_shard, target_shard:
    along the rules' axes.  parts: (region of the source, region of the target), of equal shape; within the slot of a
    stacked target.
    """

    source_rule: int
    source_shard: int
    target_rule: int
    target_shard: int
    parts: tuple[tuple[TensorSlice, TensorSlice], ...]

    @property
    def elements(self) -> int:
        """Elements of all parts."""
        return sum(target.num_elements for _, target in self.parts)


@dataclass(frozen=True, slots=True)
class Copy:
    """One region to send.

    source: canonical name within model chunk ``chunk`` of ``source_rank``.  target: vLLM's name.  slot: index into the
    first dimension of a stacked target, which ``target_slice`` leaves out; None for a target that is not stacked.
    """

    source_rank: int
    chunk: int
    source: str
    source_slice: TensorSlice
    target_rank: int
    target: str
    slot: int | None
    target_slice: TensorSlice


@dataclass(frozen=True, slots=True)
class Names:
    """The names of a row, as in ``Copy``."""

    chunk: int
    source: str
    target: str
    slot: int | None


def same_part(source: Piece, target: Piece) -> tuple[TensorSlice, TensorSlice] | None:
    """(region of the source's tensor, region of the target's) of the elements that both hold; None if there are none.

    source, target: pieces of the same Hugging Face tensor.
    """
    shared = source.hf_region.shared(target.hf_region)
    if shared is None:
        return None
    return shared.moved(source.hf_start, source.local_start), shared.moved(target.hf_start, target.local_start)


def _joined(parts: list[tuple[TensorSlice, TensorSlice]], dim: int) -> tuple[tuple[TensorSlice, TensorSlice], ...]:
    """Merges ``parts`` that are adjacent along ``dim`` in the source and in the target."""
    joined: list[tuple[TensorSlice, TensorSlice]] = []
    for part in sorted(parts, key=lambda part: part[1]):
        if joined:
            merged = [_follows(before, region, dim) for before, region in zip(joined[-1], part, strict=True)]
            if merged[0] is not None and merged[1] is not None:
                joined[-1] = (merged[0], merged[1])
                continue
        joined.append(part)
    return tuple(joined)


def _follows(before: TensorSlice, region: TensorSlice, dim: int) -> TensorSlice | None:
    """Both regions as one if ``region`` begins where ``before`` ends along ``dim``, else None."""
    if region.start != (*before.start[:dim], before.end[dim], *before.start[dim + 1 :]):
        return None
    shape = (*before.shape[:dim], before.shape[dim] + region.shape[dim], *before.shape[dim + 1 :])
    same = before.shape[:dim] + before.shape[dim + 1 :] == region.shape[:dim] + region.shape[dim + 1 :]
    return TensorSlice(before.start, shape) if same else None


@dataclass(frozen=True, eq=False)
class ReshardPlan:
    """Rows (source tensor, target tensor, geometry), in the order of the layers: the same order in every process.

    replicas: which training rank holds what.  itemsize: bytes of an element where a rule does not fix the dtype.
    source_rank, target_rank: int32 [rows].  source, target: int32 [rows], tensors as ``source_ids`` and ``target_ids``
    number them.  geometry: int32 [rows], index into ``geometries``.  sites: where the ranks are, if it is known.
    relay: int32 [rows], the rollout rank that receives the same bytes from ``source_rank`` and passes them on inside
    its node; ``DIRECT``: they come straight.
    """

    table: Table
    rollout: RolloutTable
    replicas: Replicas
    itemsize: int
    geometries: tuple[Geometry, ...]
    source_rank: Int32Array
    source: Int32Array
    target_rank: Int32Array
    target: Int32Array
    geometry: Int32Array
    relay: Int32Array
    sites: Sites | None = None

    def __len__(self) -> int:
        return len(self.geometry)

    @cached_property
    def source_ids(self) -> TensorIds:
        """The numbering of ``source``."""
        return TensorIds(self.table.rules, self.table.model)

    @cached_property
    def target_ids(self) -> TensorIds:
        """The numbering of ``target``; a stacked tensor has a number for each expert."""
        return TensorIds(self.rollout.rules, self.rollout.model)

    @cached_property
    def geometry_bytes(self) -> Int64Array:
        """Bytes of each geometry: int64 [geometries]."""
        return np.array(_bytes_of(self.geometries, self.rollout, self.itemsize))

    @cached_property
    def contents(self) -> Int32Array:
        """A number for each geometry: int32; geometries of the same elements of a source, in one dtype, share it."""
        return _contents(self.geometries, self.rollout)

    @cached_property
    def bytes_sent(self) -> Int64Array:
        """Bytes that each training rank sends: int64 [ranks]."""
        return self._bytes_by(self.source_rank, self.table.layout.world_size)

    @cached_property
    def bytes_received(self) -> Int64Array:
        """Bytes that each rollout rank receives: int64 [ranks]."""
        return self._bytes_by(self.target_rank, self.rollout.layout.world_size)

    def _bytes_by(self, ranks: Int32Array, world_size: int) -> Int64Array:
        # Counts per geometry first: floats, which bincount sums, would be exact below 2**53 bytes only.
        counts = np.zeros((world_size, len(self.geometries)), dtype=np.int64)
        np.add.at(counts, (ranks, self.geometry), 1)
        return counts @ self.geometry_bytes

    def copies_from(self, rank: int) -> Iterator[tuple[int, list[Copy]]]:
        """(place, copies) that training rank ``rank`` sends, in the order of the places: -1, layers 0 to L - 1, L.

        -1 is before the layers (the embedding), L behind them (the last norm, the output projection).
        """
        return self._copies(self._rows_of(self._by_source, rank))

    def copies_to(self, rank: int) -> Iterator[tuple[int, list[Copy]]]:
        """(place, copies) that rollout rank ``rank`` receives, as ``copies_from``."""
        return self._copies(self._rows_of(self._by_target, rank))

    @cached_property
    def _by_source(self) -> tuple[Int64Array, Int64Array]:
        return grouped(self.source_rank, self.table.layout.world_size)

    @cached_property
    def _by_target(self) -> tuple[Int64Array, Int64Array]:
        return grouped(self.target_rank, self.rollout.layout.world_size)

    def _rows_of(self, groups: tuple[Int64Array, Int64Array], rank: int) -> Int64Array:
        order, bounds = groups
        return order[bounds[rank] : bounds[rank + 1]]

    def _copies(self, rows: Int64Array) -> Iterator[tuple[int, list[Copy]]]:
        places = self.target_ids.places(self.target[rows])
        starts = np.flatnonzero(np.diff(places, prepend=-2))
        for begin, end in zip(starts, [*starts[1:], len(rows)], strict=True):
            yield int(places[begin]), list(self._copies_of(rows[begin:end]))

    def _copies_of(self, rows: Int64Array) -> Iterator[Copy]:
        columns = (self.source_rank[rows], self.target_rank[rows], self.geometry[rows])
        for names, source_rank, target_rank, number in zip(
            self.names(rows), *(column.tolist() for column in columns), strict=True
        ):
            for source_slice, target_slice in self.geometries[number].parts:
                yield Copy(
                    source_rank,
                    names.chunk,
                    names.source,
                    source_slice,
                    target_rank,
                    names.target,
                    names.slot,
                    target_slice,
                )

    def names(self, rows: NDArray[np.integer]) -> Iterator[Names]:
        """The names of each of ``rows`` on both sides."""
        _, layers, experts = self.source_ids.decode(self.source[rows])
        columns = (self.source_rank[rows], self.target_rank[rows], self.geometry[rows], layers, experts)
        for source_rank, target_rank, number, layer, expert in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            geometry = self.geometries[number]
            ours = self.table.rules[geometry.source_rule]
            theirs = self.rollout.rules[geometry.target_rule]
            chunk, source = self.replicas.local_name(ours, layer, expert, source_rank)
            slot = self.rollout.experts(target_rank).index(expert) if theirs.stacked else None
            yield Names(chunk, source, theirs.label.format(l=layer), slot)


@dataclass(frozen=True, eq=False)
class _Block:
    """Rows of one geometry, [layers, experts (1 where there are none), ranks that store the target].

    targets: ranks, [experts, ranks].  sets: the source's set of replicas, [layers, experts].  source, target: ids,
    [layers, experts].
    """

    geometry: int
    places: Int32Array
    sets: Int32Array
    source: Int32Array
    target: Int32Array
    targets: Int32Array

    @property
    def shape(self) -> tuple[int, int, int]:
        return (*self.sets.shape, self.targets.shape[1])


class _Builder:
    def __init__(self, table: Table, rollout: RolloutTable, itemsize: int, sites: Sites | None) -> None:
        self.table = table
        self.rollout = rollout
        self.itemsize = itemsize
        self.sites = sites
        self.geometries: list[Geometry] = []
        self.blocks: list[_Block] = []
        self.replicas = Replicas(table)
        self.source_ids = TensorIds(table.rules, table.model)
        self.target_ids = TensorIds(rollout.rules, table.model)

    def join(self, source: int, target: int) -> None:
        """Add the rows from rule ``source`` to rule ``target``, if both hold parts of the same tensors."""
        theirs = self.rollout.rules[target]
        ours = self.table.rules[source]
        if ours.stage is Stage.last_copy or not {h.name for h in ours.hf} & {h.name for h in theirs.hf}:
            return  # a copy is one more replica of its original
        assert ours.per_expert == theirs.per_expert, f"{ours.name} and {theirs.name}: one is per expert"
        layers = [layer for layer in self.rollout.layers(theirs) if ours.applies_to(self.table.model, layer)]
        if not layers:
            return
        of_pair = {
            (theirs_at, ours_at): self._parts(ours, ours_at, theirs, theirs_at)
            for theirs_at in range(self.rollout.num_shards(theirs))
            for ours_at in range(self.table.num_shards(ours))
        }
        wanted = Counter((ours_at, part) for (_, ours_at), parts in of_pair.items() for part, _ in parts)
        for (theirs_at, ours_at), parts in of_pair.items():
            holders = self.rollout.holders(theirs, theirs_at).astype(np.int32)
            # Rows of what several shards want (a key/value head) are apart, so that a node can share them.
            own = [part for part in parts if wanted[ours_at, part[0]] == 1]
            for some in (own, [part for part in parts if wanted[ours_at, part[0]] > 1]):
                if some:
                    joined = _joined(some, theirs.dim)
                    self.geometries.append(Geometry(source, ours_at, target, theirs_at, joined))
                    self._add(layers, holders)

    def _parts(
        self, ours: Rule, source_shard: int, theirs: Rule, target_shard: int
    ) -> list[tuple[TensorSlice, TensorSlice]]:
        model = self.table.model
        held = ours.shard(model, self.table.num_shards(ours), source_shard)
        wanted = theirs.shard(model, self.rollout.num_shards(theirs), target_shard)
        shared = [
            same_part(source, target)
            for target in pieces(theirs, model, wanted)
            for source in pieces(ours, model, held)
            if source.hf == target.hf
        ]
        return [part for part in shared if part is not None]

    def _add(self, layers: list[int | None], holders: Int32Array) -> None:
        geometry = self.geometries[-1]
        ours = self.table.rules[geometry.source_rule]
        sets = self.replicas.sets(ours, geometry.source_shard, layers)
        numbers = np.array([layer or 0 for layer in layers])[:, None]
        experts = np.arange(len(holders))[None, :]
        source = self.source_ids.encode(geometry.source_rule, numbers, experts)
        target = self.target_ids.encode(geometry.target_rule, numbers, experts)
        places = self.target_ids.places(target[:, 0])
        self.blocks.append(_Block(len(self.geometries) - 1, places, sets, source, target, holders))

    def plan(self) -> ReshardPlan:
        """All rows, each with the rank that sends it, in the order of the layers."""
        sizes_of = _bytes_of(self.geometries, self.rollout, self.itemsize)
        largest_first = sorted(self.blocks, key=lambda block: -sizes_of[block.geometry])
        sizes = [int(np.prod(block.shape)) for block in largest_first]

        def column(values: list[Int32Array]) -> Int32Array:
            out = np.empty(sum(sizes), dtype=np.int32)
            begin = 0
            for block, value, size in zip(largest_first, values, sizes, strict=True):
                out[begin : begin + size].reshape(block.shape)[...] = value
                begin += size
            return out

        geometry = np.repeat(np.array([b.geometry for b in largest_first], dtype=np.int32), sizes)
        row_bytes = np.array(sizes_of, dtype=np.int64)[geometry]
        rows = RowColumns(
            sets=column([block.sets[:, :, None] for block in largest_first]),
            num_bytes=row_bytes,
            target_rank=column([block.targets[None] for block in largest_first]),
            source=column([block.source[:, :, None] for block in largest_first]),
            content=_contents(self.geometries, self.rollout)[geometry],
        )
        source_rank, relay = senders(rows, self.replicas.members, self.table.layout.world_size, self.sites)
        places = column([block.places[:, None, None] for block in largest_first])
        order = np.argsort(places.astype(np.int16), kind="stable")
        del places, row_bytes
        return ReshardPlan(
            self.table,
            self.rollout,
            self.replicas,
            self.itemsize,
            tuple(self.geometries),
            source_rank[order],
            rows.source[order],
            rows.target_rank[order],
            column([block.target[:, :, None] for block in largest_first])[order],
            geometry[order],
            relay[order],
            self.sites,
        )


def _bytes_of(geometries: Sequence[Geometry], rollout: RolloutTable, itemsize: int) -> list[int]:
    return [each.elements * itemsize_of(rollout.rules[each.target_rule], itemsize) for each in geometries]


def _contents(geometries: Sequence[Geometry], rollout: RolloutTable) -> Int32Array:
    numbers: dict[object, int] = {}
    keys = (
        (g.source_rule, g.source_shard, rollout.rules[g.target_rule].dtype, tuple(part for part, _ in g.parts))
        for g in geometries
    )
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int32)


def plan_reshard(table: Table, rollout: RolloutTable, itemsize: int = 2, sites: Sites | None = None) -> ReshardPlan:
    """The plan from the training ranks of ``table`` to the rollout ranks of ``rollout``, of the same model.

    itemsize: bytes of an element on its way, where a rule does not fix the dtype.  sites: where the ranks are; None:
    all are alike.
    """
    assert table.model == rollout.model, "a plan is between two layouts of one model"
    builder = _Builder(table, rollout, itemsize, sites)
    for target in range(len(rollout.rules)):
        for source in range(len(table.rules)):
            builder.join(source, target)
    return builder.plan()
