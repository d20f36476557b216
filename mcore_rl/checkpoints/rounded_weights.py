"""The weights of a checkpoint as engines in fp8 multiply with them: a rank's shards are quantised, and dequantised.

Blocks are of the matrix that an engine has, in which queries, keys and values lie one below the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from mcore_rl.checkpoints.hf_directory import HfCheckpoint
from mcore_rl.config.rollout import Quantization
from mcore_rl.weights.quantised import rounded
from mcore_rl.weights.quantised_shards import LayerGroup, group_of, is_quantised
from mcore_rl.weights.rollout_table import RolloutTable, RolloutTensor
from mcore_rl.weights.views import view_of


def rounded_shard(
    checkpoint: HfCheckpoint, table: RolloutTable, stored: RolloutTensor, slot: int | None, quantization: Quantization
) -> Tensor:
    """What a rank multiplies with where it stores ``stored`` (expert ``slot``, if stacked): float32."""
    shard = torch.zeros(stored.rule.local_shape(table.model, stored.num_shards), dtype=torch.bfloat16)
    for place, piece in table.pieces(stored):
        if place == slot:
            checkpoint.read_into(piece.hf, piece.hf_region, view_of(shard, piece.local_region))
    return rounded(shard, quantization)


@torch.no_grad()
def rounded_tensors(
    checkpoint: HfCheckpoint, table: RolloutTable, quantization: Quantization, groups: Collection[LayerGroup]
) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, float32) of the quantised tensors of ``groups``.

    A tensor that several ranks hold and round differently (keys beside queries of no whole block) is the last rank's.
    """
    for on_ranks in zip(*(table.tensors(rank) for rank in range(table.layout.world_size)), strict=True):
        rule = on_ranks[0].rule
        if not is_quantised(rule) or group_of(rule) not in groups:
            continue
        made: dict[str, Tensor] = {}
        for stored in {(each.experts.start, each.index): each for each in on_ranks}.values():
            shards: dict[int | None, Tensor] = {}
            for slot, piece in table.pieces(stored):
                if slot not in shards:
                    shards[slot] = rounded_shard(checkpoint, table, stored, slot, quantization)
                whole = made.setdefault(piece.hf, torch.empty(checkpoint.tensors[piece.hf].shape))
                view_of(whole, piece.hf_region).copy_(view_of(shards[slot], piece.local_region))
        yield from made.items()
