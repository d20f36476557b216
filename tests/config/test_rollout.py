"""Rollout layouts as text, what vLLM refuses, and rollout settings that cannot be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mcore_rl.config.engine import Precision
from mcore_rl.config.lora import PublishedLora
from mcore_rl.config.model import RopeConfig, RopeType
from mcore_rl.config.rollout import (
    MoeBackend,
    Quantization,
    RolloutConfig,
    RolloutLayout,
    ValidationConfig,
    context_violations,
    kv_bytes_per_token,
    parse_rollout_layout,
    rollout_config_violations,
    rollout_violations,
    sequence_bytes,
)
from mcore_rl.ground.errors import ConfigError
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
        (models.olmoe(), RolloutLayout(tp=4), "norms the keys at once"),
        (models.gpt_oss(), RolloutLayout(tp=4), "shares no key of a model with sinks. Write a rollout.tp of 2 or less"),
        (
            models.qwen3_next(num_attention_heads=8),
            RolloutLayout(tp=8),
            "rollout.tp=8: does not divide model.linear_attention.num_key_heads=4",
        ),
        (models.dense(), RolloutLayout(tp=2, ep=2), "the model has no experts. Write rollout.ep=1"),
        (models.moe(), RolloutLayout(tp=4, dp=2, ep=2), "Write rollout.ep as one of [1, 4, 8]"),
        (models.moe(), RolloutLayout(tp=2, dp=4, ep=8), "does not divide model.moe.num_experts=4. Write rollout.ep as"),
    ],
)
def test_what_vllm_cannot_run_is_refused_with_a_remedy(model: object, layout: RolloutLayout, said: str) -> None:
    assert said in "\n".join(map(str, rollout_violations(model, layout)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(n=0), "rollout.n=0: must be positive"),
        (dict(max_response_length=0), "rollout.max_response_length=0: must be positive"),
        (dict(kv_cache_memory_bytes=0), "rollout.kv_cache_memory_bytes=0: must be positive"),
        (dict(temperature=-0.1), "rollout.temperature=-0.1: must not be negative"),
        (dict(temperature=0.001), "rollout.temperature=0.001: vLLM draws as if it were 0.01"),
        (dict(temperature=0.0, n=4), "draws the same response rollout.n=4 times"),
        (dict(top_p=0.0), "rollout.top_p=0.0: must lie in (0, 1]"),
        (dict(top_k=0), "rollout.top_k=0: keeps no token. Write -1"),
        (dict(stop=["", "x"]), "rollout.stop[0]=: is empty"),
        (dict(moe_backend=MoeBackend.aiter), "rollout.moe_backend=aiter: rearranges the experts' weights in place"),
        (dict(moe_backend=MoeBackend.flashinfer_trtllm), "Write rollout.moe_backend=auto"),
        (
            dict(quantization=Quantization.fp8_block, dtype=Precision.float32),
            "rollout.dtype=float32: is what vLLM quantises to fp8_block, and it takes bfloat16 alone. "
            "Write rollout.dtype=bfloat16, or rollout.quantization=none",
        ),
        (
            dict(quantization=Quantization.mxfp8, lora=PublishedLora.adapter),
            "rollout.lora=adapter: adds adapters to weights in mxfp8, whose rounding they were not trained with",
        ),
        (dict(gpu_memory_utilization=1.5), "must lie in (0, 1]. Write 0.5"),
        (dict(val_kwargs=ValidationConfig(n=0, top_p=2.0)), "rollout.val_kwargs.top_p=2.0"),
    ],
)
def test_a_value_that_cannot_be_is_named(changes: dict[str, object], said: str) -> None:
    assert said in "\n".join(map(str, rollout_config_violations(RolloutConfig(**changes))))  # type: ignore[arg-type]


def test_quantised_engines_hold_merged_weights() -> None:
    """The sum with the adapters is what is rounded, once."""
    auto = RolloutConfig(lora=PublishedLora.auto)
    assert auto.published_lora is PublishedLora.auto
    assert replace(auto, quantization=Quantization.fp8_block).published_lora is PublishedLora.merged
    assert rollout_config_violations(replace(auto, quantization=Quantization.fp8_block)) == []


def test_the_defaults_are_sound_and_validation_is_greedy() -> None:
    assert rollout_config_violations(RolloutConfig()) == []
    assert RolloutConfig().val_kwargs.temperature == 0


def test_what_the_model_has_no_room_for_is_named() -> None:
    model = models.dense()  # 128 tokens; 4 layers of 2 key/value heads of 16
    fits = RolloutConfig(max_prompt_length=100, max_response_length=28, dtype=Precision.float32)
    assert context_violations(model, fits) == []
    assert kv_bytes_per_token(model, fits) == 2 * 4 * 2 * 16 * 4
    assert kv_bytes_per_token(model, RolloutConfig(tp=2)) == 2 * 4 * 1 * 16 * 2
    assert kv_bytes_per_token(model, RolloutConfig(tp=4)) == kv_bytes_per_token(model, RolloutConfig(tp=2))
    long = RolloutConfig(max_prompt_length=100, max_response_length=29, kv_cache_memory_bytes=2**10)
    said = "\n".join(map(str, context_violations(model, long)))
    assert "exceeds the model's 128 tokens. Lower one of them, to 128 in all" in said
    assert f"does not hold one sequence of 129 tokens, which takes {129 * 512}" in said


def test_linear_attention_keeps_a_state_and_no_keys() -> None:
    """Three layers: 2 tokens of 4 * 10 * 2 + 8 * 6 channels, and 8 heads of 10 times 6.  The other: keys and values."""
    model = models.qwen3_next()
    assert kv_bytes_per_token(model, RolloutConfig()) == 2 * 1 * 2 * 16 * 2
    assert sequence_bytes(model, RolloutConfig(), 7) == 7 * 128 + 3 * (2 * 128 + 8 * 60) * 2
    assert sequence_bytes(model, RolloutConfig(tp=2), 7) == 7 * 64 + 3 * (2 * 64 + 4 * 60) * 2


def test_positions_that_yarn_does_not_reach_are_refused() -> None:
    rope = RopeConfig(type=RopeType.yarn, factor=4.0, original_max_position_embeddings=16)
    model = replace(models.dense(max_position_embeddings=128), rope=rope)
    assert context_violations(model, RolloutConfig(max_prompt_length=32, max_response_length=32)) == []
    (violation,) = context_violations(model, RolloutConfig(max_prompt_length=33, max_response_length=32))
    assert "exceeds the 64 tokens that YaRN reaches: factor 4 times 16" in str(violation)
