"""What a rollout rank stores; real vLLM's word on it is in tests/e2e/test_reshard_into_vllm.py."""

from __future__ import annotations

import pytest

from mcore_rl.config.rollout import parse_rollout_layout
from mcore_rl.families.registry import FAMILIES
from mcore_rl.ground.errors import ConfigError
from mcore_rl.weights.rollout_table import RolloutTable
from tests.support import models


def shapes(layout: str, rank: int) -> dict[str, tuple[int, ...]]:
    table = RolloutTable(FAMILIES["deepseek_v3"], models.deepseek_v3(), parse_rollout_layout(layout))
    return {tensor.name: table.shape(tensor) for tensor in table.tensors(rank)}


@pytest.mark.parametrize(
    ("layout", "routed", "shared"),
    [
        ("tp=2,dp=2", (12, 32, 48), (64, 48)),  # both cut over 2
        ("tp=2,dp=2,ep=2", (6, 64, 48), (64, 48)),
        ("tp=2,dp=2,ep=4", (3, 64, 48), (128, 48)),  # shared experts whole, where the routed span replicas
    ],
)
def test_experts_by_hand(layout: str, routed: tuple[int, ...], shared: tuple[int, ...]) -> None:
    """12 experts of width 32 and shared ones of 64, hidden size 48; gate and up are one."""
    by_name = shapes(layout, 3)
    assert by_name["model.layers.3.mlp.experts.routed_experts.w13_weight"] == routed
    assert by_name["model.layers.3.mlp.shared_experts.gate_up_proj.weight"] == shared


def test_a_rank_has_the_experts_of_its_place() -> None:
    def experts(layout: str) -> list[list[int]]:
        parsed = parse_rollout_layout(layout)
        table = RolloutTable(FAMILIES["mixtral"], models.moe(ffn_hidden_size=64), parsed)
        return [list(table.experts(rank)) for rank in range(parsed.world_size)]

    assert experts("tp=2,dp=2") == [[0, 1, 2, 3]] * 4
    assert experts("tp=2,dp=2,ep=2") == [[0, 1], [2, 3]] * 2
    assert experts("tp=2,dp=2,ep=4") == [[0], [1], [2], [3]]


def test_a_layout_that_vllm_does_not_run_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.tp=3"):
        shapes("tp=3", 0)
