"""A family's rollout table for one model and one layout: the tensors of each rank of vLLM, and what they are made of.

Integers and names only.  ``weights/table.py`` is the same for Megatron's tensors; ``weights/reshard.py`` joins the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.rollout import RolloutLayout, rollout_violations
from mcore_rl.families.family import Family
from mcore_rl.families.rules import Axis, Rule, ShardRanges, Stage, num_experts
from mcore_rl.families.towers import TOWER
from mcore_rl.ground.errors import refuse_if_any
from mcore_rl.weights.table import Piece, pieces


@dataclass(frozen=True, slots=True)
class RolloutTensor:
    """A tensor of one rollout rank.

    name: vLLM's; of several that take turns in a parameter of vLLM, with the turn behind it.  layer: None for a tensor
    outside the layers.  experts: the experts in the slots of a stacked tensor, in order; else empty.  num_shards,
    index: shard ``index`` of ``num_shards`` along the rule's axis.
    """

    name: str
    rule: Rule
    layer: int | None
    experts: range
    num_shards: int
    index: int

    @property
    def parameter(self) -> str:
        """The name of vLLM's parameter."""
        return self.rule.name.format(l=self.layer)

    @property
    def turns(self) -> tuple[slice, ...]:
        """Index of vLLM's parameter (of one slot, if stacked): the elements that are this tensor."""
        which, count = self.rule.turn
        return (*(slice(None),) * self.rule.dim, slice(which, None, count))


def itemsize_of(rule: Rule, itemsize: int) -> int:
    """Bytes of an element of ``rule``: ``itemsize``, unless the rule fixes the dtype."""
    return itemsize if rule.dtype is None else {"float32": 4}[rule.dtype]


class RolloutTable:
    """The tensors of every rank of ``layout``.

    latent_attention: False if vLLM expands the keys and values of a model with latent attention (``VLLM_MLA_DISABLE``).
    tower: False leaves out the tensors of the vision tower.
    Raises ConfigError if vLLM cannot run ``model`` in this layout.
    """

    def __init__(
        self,
        family: Family,
        model: ModelConfig,
        layout: RolloutLayout,
        *,
        latent_attention: bool = True,
        tower: bool = True,
    ) -> None:
        refuse_if_any(rollout_violations(model, layout))
        rules = family.rollout if latent_attention or model.mla is None else family.rollout_without_latent
        self.family = family
        self.model = model
        self.layout = layout
        self.latent_attention = latent_attention
        self.rules = tuple(rule for rule in rules if rule.only(model) and (tower or not rule.name.startswith(TOWER)))
        for rule in self.rules:
            assert rule.stage is not Stage.last_copy, f"{rule.name}: vLLM has no pipeline here, so nothing is copied"
            assert rule.stacked == rule.per_expert, f"{rule.name}: vLLM stacks its experts"

    def num_shards(self, rule: Rule) -> int:
        """Number of ranks that a tensor (of one expert, if stacked) is split over."""
        cut = {
            Axis.none: False,
            Axis.tensor: True,
            Axis.expert_tensor: self.layout.ep == 1,
            Axis.shared_expert: not self.layout.experts_span_replicas,
        }[rule.axis]
        return self.layout.tp if cut else 1

    def shard_index(self, rule: Rule, rank: int) -> int:
        """Which shard ``rank`` stores."""
        return rank % self.layout.tp % self.num_shards(rule)

    def experts(self, rank: int) -> range:
        """The experts that ``rank`` stores, whole or in shards, in the order of their slots."""
        count = num_experts(self.model) // self.layout.ep
        first = rank % self.layout.ep * count
        return range(first, first + count)

    def holders(self, rule: Rule, index: int) -> NDArray[np.int64]:
        """Ranks that store shard ``index`` of a tensor of ``rule``: [experts (1 if not stacked), ranks of each]."""
        ranks = [rank for rank in range(self.layout.world_size) if self.shard_index(rule, rank) == index]
        if not rule.stacked:
            return np.array([ranks])
        return np.array(
            [[rank for rank in ranks if expert in self.experts(rank)] for expert in range(num_experts(self.model))]
        )

    def layers(self, rule: Rule) -> list[int | None]:
        """The layers that have a tensor of ``rule``; see ``Rule.layers_of``."""
        return rule.layers_of(self.model)

    def tensors(self, rank: int) -> Iterator[RolloutTensor]:
        """Every tensor of ``rank``, rule by rule."""
        for rule in self.rules:
            experts = self.experts(rank) if rule.stacked else range(0)
            for layer in self.layers(rule):
                name = rule.label.format(l=layer)
                yield RolloutTensor(name, rule, layer, experts, self.num_shards(rule), self.shard_index(rule, rank))

    def shard(self, tensor: RolloutTensor) -> ShardRanges:
        """The split dimension of ``tensor``."""
        return tensor.rule.shard(self.model, tensor.num_shards, tensor.index)

    def shape(self, tensor: RolloutTensor) -> tuple[int, ...]:
        """The shape of ``tensor``; the first dimension of a stacked tensor is its slots."""
        shape = tensor.rule.local_shape(self.model, tensor.num_shards)
        return (len(tensor.experts), *shape) if tensor.rule.stacked else shape

    def parameter_shape(self, tensor: RolloutTensor) -> tuple[int, ...]:
        """The shape of vLLM's parameter: that of ``tensor``, unless others take turns in it."""
        shape = list(self.shape(tensor))
        dim = tensor.rule.dim + tensor.rule.stacked
        shape[dim] *= tensor.rule.turn[1]
        return tuple(shape)

    def pieces(self, tensor: RolloutTensor) -> list[tuple[int | None, Piece]]:
        """(slot or None, piece) of everything that ``tensor`` is made of; the rest is padding."""
        shard = self.shard(tensor)
        slots = list(enumerate(tensor.experts)) if tensor.rule.stacked else [(None, None)]
        return [
            (slot, piece)
            for slot, expert in slots
            for piece in pieces(tensor.rule, self.model, shard, tensor.layer, expert)
        ]

    def bytes_stored(self, itemsize: int) -> NDArray[np.int64]:
        """Bytes that each rank stores, without padding: int64 [ranks].  No plan can send fewer."""
        stored = np.zeros(self.layout.world_size, dtype=np.int64)
        for rule in self.rules:
            other = prod(size for dim, size in enumerate(rule.hf_shapes(self.model)[0]) if dim != rule.dim)
            for index in range(self.num_shards(rule)):
                held = rule.shard(self.model, self.num_shards(rule), index).held
                one = held * other * itemsize_of(rule, itemsize) * len(self.layers(rule))
                np.add.at(stored, self.holders(rule, index).ravel(), one)
        return stored
