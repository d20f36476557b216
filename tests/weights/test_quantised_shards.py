"""Which models and layouts cannot be quantised, and what of the others stays plain."""

from __future__ import annotations

import pytest

from mcore_rl.config.model import MoeConfig
from mcore_rl.config.rollout import Quantization, RolloutConfig
from mcore_rl.families.registry import FAMILIES, model_of
from mcore_rl.weights.quantised_shards import shard_violations, tensors_by_form
from tests.support import models, picture_models

WHOLE = models.dense(hidden_size=256, num_attention_heads=8, head_dim=32, ffn_hidden_size=384)
EXPERTS = models.moe(
    hidden_size=256, num_attention_heads=8, head_dim=32, moe=MoeConfig(num_experts=4, top_k=2, ffn_hidden_size=192)
)


def said(name: str, model: object, quantization: Quantization, **changes: int) -> str:
    config = RolloutConfig(quantization=quantization, **changes)  # type: ignore[arg-type]
    return " ".join(map(str, shard_violations(FAMILIES[name], model, config)))  # type: ignore[arg-type]


def test_shards_that_are_no_whole_blocks_are_named() -> None:
    assert said("llama", WHOLE, Quantization.fp8_block) == ""
    assert said("llama", WHOLE, Quantization.fp8_block, tp=2) == (
        "rollout.quantization=fp8_block: scales 128 columns of a matrix at a time, and mlp.down_proj.weight has 192 on "
        "a rank. Write a rollout.tp that leaves multiples of 128"
    )
    assert said("llama", WHOLE, Quantization.mxfp8, tp=2) == ""
    assert "has 16 on a rank" in said("llama", models.dense(), Quantization.mxfp8, tp=4)
    alone = said("mixtral", EXPERTS, Quantization.fp8_block)
    assert "routed_experts.w2_weight has 192" in alone and alone.endswith("Write rollout.quantization=fp8_channel")
    assert "w2_weight" not in said("mixtral", EXPERTS, Quantization.mxfp8)


@pytest.mark.parametrize("quantization", [Quantization.fp8_channel, Quantization.fp8_tensor], ids=str)
def test_a_row_or_a_tensor_is_whole_on_one_rank_alone(quantization: Quantization) -> None:
    assert said("llama", models.dense(), quantization, dp=4) == ""
    assert said("llama", models.dense(), quantization, tp=4) == (
        f"rollout.quantization={quantization.value}: has scales of elements that several ranks hold, and these would "
        "wait for one another in an update. Write rollout.tp=1, or rollout.quantization=fp8_block"
    )


def test_models_whose_updates_are_not_quantised_yet_are_refused() -> None:
    assert "updates of latent attention" in said("deepseek_v2", models.deepseek_v2(), Quantization.fp8_channel)
    family, seeing = model_of(picture_models.config("qwen3_vl"), pictures=True)
    (violation,) = shard_violations(family, seeing, RolloutConfig(quantization=Quantization.fp8_channel))
    assert "updates of a model with a vision tower are not quantised yet" in str(violation)
    assert "updates of experts whose halves take turns" in said("gpt_oss", models.gpt_oss(), Quantization.fp8_channel)
    assert said("gpt_oss", models.gpt_oss(), Quantization.none) == ""


def test_what_stays_plain_is_named() -> None:
    quantised, plain = tensors_by_form(FAMILIES["mixtral"], EXPERTS)
    assert quantised == [
        "self_attn.qkv_proj.weight",
        "self_attn.o_proj.weight",
        "block_sparse_moe.experts.routed_experts.w13_weight",
        "block_sparse_moe.experts.routed_experts.w2_weight",
    ]
    assert plain == ["model.embed_tokens.weight", "lm_head.weight", "block_sparse_moe.gate.weight"]
