"""The numbers that engines in fp8 multiply with, from a checkpoint's files; tests/reports has them in a whole model."""

from __future__ import annotations

from pathlib import Path

import torch

from mcore_rl.checkpoints.convert import open_hf
from mcore_rl.checkpoints.rounded_weights import rounded_tensors
from mcore_rl.config.rollout import Quantization, parse_rollout_layout
from mcore_rl.weights.quantised import rounded
from mcore_rl.weights.quantised_shards import LayerGroup
from mcore_rl.weights.rollout_table import RolloutTable
from tests.support import quantised_engines

LAYER = "model.layers.1."


def test_tensors_of_a_group_whole_from_the_shards_of_two_ranks(tmp_path: Path) -> None:
    """Rows of queries, keys and values of a rank are one matrix, and so are the two halves of an expert's first."""
    checkpoint, plain = open_hf(quantised_engines.write("qwen3_moe", tmp_path)[0])
    table = RolloutTable(plain.family, plain.model, parse_rollout_layout("tp=2,ep=2"))
    made = {group: dict(rounded_tensors(checkpoint, table, Quantization.fp8_block, [group])) for group in LayerGroup}
    assert not made[LayerGroup.dense]
    assert len(made[LayerGroup.attention]) == 2 * 4 and len(made[LayerGroup.experts]) == 2 * 4 * 3
    names = [f"{LAYER}self_attn.{letter}_proj.weight" for letter in "qkv"]
    for rank in range(2):
        parts = [checkpoint.read(name).chunk(2)[rank] for name in names]
        wanted = rounded(torch.cat(parts), Quantization.fp8_block).split([len(part) for part in parts])
        for name, part in zip(names, wanted, strict=True):
            assert made[LayerGroup.attention][name].chunk(2)[rank].equal(part)
    experts = [f"{LAYER}mlp.experts.3.{name}_proj.weight" for name in ("gate", "up", "down")]
    gate, up, down = (checkpoint.read(name) for name in experts)
    wanted = (*rounded(torch.cat([gate, up]), Quantization.fp8_block).chunk(2), rounded(down, Quantization.fp8_block))
    for name, part in zip(experts, wanted, strict=True):
        assert made[LayerGroup.experts][name].equal(part)
