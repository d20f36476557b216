"""Which training ranks hold a tensor, and its name on each: ``Table`` inverted."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mcore_rl.arrays import Int32Array, Int64Array
from mcore_rl.families.rules import Axis, Rule, Stage
from mcore_rl.weights.table import Table


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

    def num_shards(self, rule: Rule) -> int:
        """Number of ranks that a tensor of ``rule`` is split over."""
        layout = self.table.layout
        return {Axis.none: 1, Axis.tensor: layout.tp, Axis.expert_tensor: layout.etp}[rule.axis]

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
