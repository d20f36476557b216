"""Rollout layouts as text, and what vLLM refuses."""

from __future__ import annotations

import pytest

from mcore_rl.config.rollout import RolloutLayout, parse_rollout_layout, rollout_violations
from mcore_rl.errors import ConfigError
from tests.support import models


def test_text_and_layout_are_each_other() -> None:
    layout = parse_rollout_layout("tp=8, dp=4,ep=32")
    assert layout == RolloutLayout(tp=8, dp=4, ep=32)
    assert parse_rollout_layout(str(layout)) == layout
    assert parse_rollout_layout("") == RolloutLayout()


def test_every_mistake_in_the_text_is_named() -> None:
    with pytest.raises(ConfigError) as error:
        parse_rollout_layout("pp=2,tp=0,tp=1,tp=1")
    for said in ("rollout layout=pp=2: no such axis", "tp=0: a size is a positive integer", "tp is given twice"):
        assert said in str(error.value)


@pytest.mark.parametrize(
    ("layout", "world", "engine_dp", "span"),
    [
        (RolloutLayout(tp=2, dp=4), 8, 1, False),
        (RolloutLayout(tp=2, dp=4, ep=2), 8, 1, False),
        (RolloutLayout(tp=2, dp=4, ep=8), 8, 4, True),
        (RolloutLayout(tp=1, dp=4, ep=4), 4, 4, True),
    ],
)
def test_replicas_that_share_experts_are_one_engine(
    layout: RolloutLayout, world: int, engine_dp: int, span: bool
) -> None:
    assert (layout.world_size, layout.engine_dp, layout.experts_span_replicas) == (world, engine_dp, span)


@pytest.mark.parametrize(
    "layout",
    [RolloutLayout(tp=4), RolloutLayout(tp=2, dp=2, ep=2), RolloutLayout(tp=2, dp=2, ep=4), RolloutLayout(dp=4, ep=4)],
)
def test_what_vllm_runs_is_not_refused(layout: RolloutLayout) -> None:
    assert rollout_violations(models.moe(), layout) == []


@pytest.mark.parametrize(
    ("model", "layout", "said"),
    [
        (models.dense(), RolloutLayout(tp=0), "rollout.tp=0: must be positive"),
        (models.dense(), RolloutLayout(tp=3), "does not divide model.num_attention_heads=4"),
        (models.dense(), RolloutLayout(tp=3), "does not divide the padded vocabulary=128"),
        (models.dense(ffn_hidden_size=97), RolloutLayout(tp=2), "does not divide model.ffn_hidden_size=97"),
        (models.dense(num_attention_heads=6, num_query_groups=3), RolloutLayout(tp=2), "model.num_query_groups=3"),
        (models.dense(), RolloutLayout(tp=2, ep=2), "the model has no experts. Write rollout.ep=1"),
        (models.moe(), RolloutLayout(tp=4, dp=2, ep=2), "Write rollout.ep as one of [1, 4, 8]"),
        (models.moe(), RolloutLayout(tp=2, dp=4, ep=8), "does not divide model.moe.num_experts=4. Write rollout.ep as"),
    ],
)
def test_what_vllm_cannot_run_is_refused_with_a_remedy(model: object, layout: RolloutLayout, said: str) -> None:
    assert said in "\n".join(map(str, rollout_violations(model, layout)))  # type: ignore[arg-type]
