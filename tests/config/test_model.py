"""What a model may not be, each mistake by itself, with the key and the remedy that its message must name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mcore_rl.config.model import ModelConfig, RopeConfig, RopeType, RouterScore
from mcore_rl.config.model_violations import model_violations
from tests.support import models

QWEN, DEEPSEEK = models.qwen2_moe(), models.deepseek_v3()
assert QWEN.moe is not None and DEEPSEEK.moe is not None and DEEPSEEK.mla is not None


def moe(model: ModelConfig, **changes: object) -> ModelConfig:
    assert model.moe is not None
    return replace(model, moe=replace(model.moe, **changes))


def mla(**changes: object) -> ModelConfig:
    assert DEEPSEEK.mla is not None
    return replace(DEEPSEEK, mla=replace(DEEPSEEK.mla, **changes))


def linear(**changes: object) -> ModelConfig:
    model = models.qwen3_next()
    assert model.linear_attention is not None
    return replace(model, linear_attention=replace(model.linear_attention, **changes))


@pytest.mark.parametrize(
    "model",
    [
        models.dense(),
        models.moe(),
        QWEN,
        DEEPSEEK,
        models.deepseek_v3(q_lora_rank=None, yarn=True),
        models.gemma2(),
        models.gemma3(),
        models.olmoe(),
        models.minimax_m2(),
        models.smollm3(),
        models.ernie4_5(),
        models.phi3(),
        models.gpt_oss(),
        models.qwen3_next(),
        models.qwen3_5(),
        models.qwen3_5_moe(),
        moe(QWEN, top_k=8),
        moe(DEEPSEEK, top_k=8),
        moe(DEEPSEEK, num_groups=12, top_k_groups=12),
    ],
)
def test_a_sound_model_has_no_violation(model: ModelConfig) -> None:
    assert model_violations(model) == []


@pytest.mark.parametrize(
    ("model", "key", "remedy"),
    [
        (models.dense(hidden_size=0), "model.hidden_size", "1 or more"),
        (linear(num_value_heads=6), "model.linear_attention.num_value_heads", "a multiple"),
        (linear(conv_kernel_dim=0), "model.linear_attention.conv_kernel_dim", "1 or more"),
        (linear(layers=[0, 1, 2, 3]), "model.linear_attention.layers", "some of the layers"),
        (linear(layers=[]), "model.linear_attention.layers", "some of the layers"),
        (linear(layers=[4]), "model.linear_attention.layers", "Leave them out"),
        (models.deepseek_v3(attention_output_gate=True), "model.attention_output_gate", "Write false"),
        (models.dense(num_query_groups=3), "model.num_query_groups", "[1, 2, 4]"),
        (models.dense(rotary_percent=0.2), "model.rotary_percent", "rotates an even number"),  # 3 of 16
        (models.dense(rotary_percent=0.05), "model.rotary_percent", "rotates an even number"),
        (models.dense(rotary_percent=1.5), "model.rotary_percent", "Write 1"),
        (models.deepseek_v3(rotary_percent=0.5), "model.rotary_percent", "Write 1"),
        (
            models.with_rope(RopeConfig(type=RopeType.yarn, factor=2.0, attention_factor=1.1), rotary_percent=0.5),
            "model.rotary_percent",
            "Write 1",
        ),
        (models.dense(head_dim=15), "model.head_dim", "even"),
        (models.dense(sliding_layers=[0]), "model.sliding_window", "1 or more"),
        (models.dense(sliding_layers=[4], sliding_window=3), "model.sliding_layers", "Leave them out"),
        (models.dense(joint_qk_norm=True), "model.joint_qk_norm", "qk_norm=true"),
        (models.dense(local_rotary_base=500.0), "model.local_rotary_base", "null"),
        (models.dense(no_rope_layers=[4]), "model.no_rope_layers", "Leave them out"),
        (models.gemma3(no_rope_layers=[1]), "model.no_rope_layers", "Write []"),
        (models.deepseek_v3(rotary_interleaved=True), "model.rotary_interleaved", "model.mla.interleaved=true"),
        (replace(models.phi3(), local_rotary_base=500.0), "model.local_rotary_base", "attention factor"),
        (models.phi3(qk_norm=True), "model.rotary_percent", "Write 1"),
        (moe(QWEN, top_k=9), "model.moe.top_k", "1 to 8"),
        (moe(QWEN, top_k=0), "model.moe.top_k", "1 to 8"),
        (moe(QWEN, top_k=1, norm_topk_prob=True), "model.moe.norm_topk_prob", "false"),
        (moe(QWEN, num_experts=0), "model.moe.num_experts", "1 or more"),
        (moe(QWEN, ffn_hidden_size=0), "model.moe.ffn_hidden_size", "1 or more"),
        (moe(QWEN, shared_ffn_hidden_size=-1, shared_gate=False), "model.moe.shared_ffn_hidden_size", "0 for none"),
        (moe(QWEN, shared_ffn_hidden_size=0), "model.moe.shared_gate", "false"),
        (moe(QWEN, dense_layers=[1, 4, -1]), "model.moe.dense_layers", "Leave them out"),
        (moe(QWEN, dense_layers=[0, 1, 2, 3]), "model.moe.dense_layers", "model.moe=null"),
        (moe(QWEN, expert_bias=True), "model.moe.expert_bias", "score=sigmoid"),
        (moe(DEEPSEEK, score=RouterScore.softmax), "model.moe.expert_bias", "score=sigmoid"),
        (moe(DEEPSEEK, num_groups=5), "model.moe.num_groups", "divisor"),
        (moe(DEEPSEEK, num_groups=12, top_k_groups=3), "model.moe.num_groups", "6 or less"),
        (moe(DEEPSEEK, num_groups=0), "model.moe.num_groups", "1 or more"),
        (moe(DEEPSEEK, top_k_groups=4), "model.moe.top_k_groups", "1 to 3"),
        (moe(DEEPSEEK, top_k_groups=0), "model.moe.top_k_groups", "1 to 3"),
        (moe(DEEPSEEK, top_k=9), "model.moe.top_k", "1 to 8"),
        (mla(kv_lora_rank=0), "model.mla.kv_lora_rank", "1 or more"),
        (mla(q_lora_rank=0), "model.mla.q_lora_rank", "1 or more"),
        (mla(qk_rope_head_dim=7, qk_nope_head_dim=13), "model.mla.qk_rope_head_dim", "even"),
        (mla(qk_nope_head_dim=14), "model.head_dim", "Write 22"),
        (replace(DEEPSEEK, num_query_groups=2), "model.num_query_groups", "Write 4"),
        (replace(DEEPSEEK, qkv_bias=True), "model.qkv_bias", "false"),
        (replace(DEEPSEEK, qk_norm=True), "model.qk_norm", "false"),
        (replace(DEEPSEEK, attention_sinks=True), "model.attention_sinks", "false"),
        (models.dense(linear_bias=True, qkv_bias=True), "model.linear_bias", "false"),
        (models.moe(linear_bias=True), "model.linear_bias", "false"),
        (replace(QWEN, linear_bias=True), "model.linear_bias", "false"),
        (models.gpt_oss(activation_clamp=0.0), "model.activation_clamp", "positive number"),
    ],
)
def test_each_mistake_is_named_once_with_its_remedy(model: ModelConfig, key: str, remedy: str) -> None:
    violations = model_violations(model)
    assert [violation.key for violation in violations] == [key]
    assert remedy in violations[0].remedy


def test_all_mistakes_come_at_once() -> None:
    wrong = moe(mla(qk_nope_head_dim=14), top_k=0, num_groups=5)
    assert {violation.key for violation in model_violations(wrong)} == {
        "model.head_dim", "model.moe.top_k", "model.moe.num_groups",
    }  # fmt: skip


def test_layers_with_experts_are_those_that_are_not_dense() -> None:
    assert [QWEN.has_experts(layer) for layer in range(4)] == [False, True, False, True]
    assert not any(models.dense().has_experts(layer) for layer in range(4))
