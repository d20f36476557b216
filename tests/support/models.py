"""Tiny models of every kind that the engine builds, small enough for the whole invariance gate, odd enough to catch
mistakes.

The vocabulary does not divide by anything (padding), ``head_dim * heads`` is not the hidden size, and there are fewer
key/value heads than heads.
"""

from __future__ import annotations

import math
from dataclasses import replace

from mcore_rl.config.model import (
    Activation,
    LinearAttentionConfig,
    MlaConfig,
    ModelConfig,
    MoeConfig,
    RopeConfig,
    RopeType,
    RouterScore,
)


def dense(**changes: object) -> ModelConfig:
    """Llama-style: grouped-query attention, SwiGLU, untied output."""
    settings = dict(
        num_layers=4,
        hidden_size=48,
        ffn_hidden_size=96,
        num_attention_heads=4,
        num_query_groups=2,
        head_dim=16,
        vocab_size=101,
        max_position_embeddings=128,
        rotary_base=10000.0,
    )
    return ModelConfig(**(settings | changes))  # type: ignore[arg-type]


def moe(*, norm_topk_prob: bool = True, **changes: object) -> ModelConfig:
    """Mixtral-style: 4 experts, 2 a token."""
    experts = MoeConfig(num_experts=4, top_k=2, ffn_hidden_size=64, norm_topk_prob=norm_topk_prob)
    return dense(**({"moe": experts} | changes))


def windowed(**changes: object) -> ModelConfig:
    """Mistral-style: a sliding window in every layer, shorter than most sequences of the tests."""
    return dense(**({"sliding_window": 5, "sliding_layers": [0, 1, 2, 3]} | changes))


def gemma2(**changes: object) -> ModelConfig:
    """Gemma-2-style; the caps are so low that tanh bends what these weights make."""
    settings = dict(
        activation=Activation.gelu_tanh,
        tie_output=True,
        sliding_window=6,
        sliding_layers=[0, 2],
        softmax_scale=8**-0.5,
        attention_soft_cap=2.0,
        output_soft_cap=1.5,
        zero_centered_norm=True,
        sandwich_norm=True,
        embedding_scale=48**0.5,
    )
    return dense(**(settings | changes))


def seed_oss(**changes: object) -> ModelConfig:
    """Seed-OSS-style: biases on q, k and v, and the rotary base that it is published with."""
    return dense(**({"qkv_bias": True, "rotary_base": 1e7} | changes))


def smollm3(**changes: object) -> ModelConfig:
    """SmolLM3-style: two layers of four rotate nothing, one behind the other or not."""
    return dense(**({"tie_output": True, "no_rope_layers": [1, 3], "head_dim": 12} | changes))


def ernie4_5(**changes: object) -> ModelConfig:
    """ERNIE-4.5-style: rotated pairs are neighbours."""
    return dense(**({"tie_output": True, "rotary_interleaved": True} | changes))


def with_rope(rope: RopeConfig, **changes: object) -> ModelConfig:
    """Llama-style with other rotary frequencies."""
    return dense(**({"rope": rope} | changes))


def qwen2_moe(dense_layers: tuple[int, ...] = (0, 2), *, norm_topk_prob: bool = False) -> ModelConfig:
    """Qwen2-MoE-style: a gated shared expert, biases on q, k and v, some layers dense."""
    experts = MoeConfig(
        num_experts=8,
        top_k=3,
        ffn_hidden_size=32,
        norm_topk_prob=norm_topk_prob,
        dense_layers=list(dense_layers),
        shared_ffn_hidden_size=56,
        shared_gate=True,
    )
    return dense(moe=experts, qkv_bias=True)


def qwen3_next(**changes: object) -> ModelConfig:
    """Qwen3-Next-style: three layers with a gated delta net, one with gated attention; all have experts.

    No width is another's, two value heads share a key head, and four ranks share two heads of the attention's keys.
    The epsilon bends the norm of a net's output, which is near 0 where a query and its keys are orthogonal: with 1e-6 a
    change of all weights by 1e-7 is one of gradients by 2e-5 (transformers), with this one 2e-6, as in other families.
    """
    linear = LinearAttentionConfig(
        layers=[0, 1, 3], num_key_heads=4, num_value_heads=8, key_head_dim=10, value_head_dim=6, conv_kernel_dim=3
    )
    experts = MoeConfig(num_experts=8, top_k=3, ffn_hidden_size=32, shared_ffn_hidden_size=56, shared_gate=True)
    settings = dict(linear_attention=linear, moe=experts, qk_norm=True, zero_centered_norm=True)
    settings |= dict(attention_output_gate=True, rotary_percent=0.25, norm_epsilon=1e-2)
    return dense(**(settings | changes))


def qwen3_5(**changes: object) -> ModelConfig:
    """Qwen3.5-style, dense: Qwen3-Next's layers around an MLP; the output is tied."""
    return qwen3_next(**({"moe": None, "tie_output": True} | changes))


def qwen3_5_moe(**changes: object) -> ModelConfig:
    """Qwen3.5-style with experts: Qwen3-Next's layers, of which the last is no linear one."""
    linear = qwen3_next().linear_attention
    assert linear is not None
    settings = {"linear_attention": replace(linear, layers=[0, 1, 2]), "ffn_hidden_size": 32}  # of an expert
    return qwen3_next(**(settings | changes))


def olmoe(**changes: object) -> ModelConfig:
    """OLMoE-style: experts whose probabilities are not renormalised, one norm over all heads of a token."""
    experts = MoeConfig(num_experts=8, top_k=3, ffn_hidden_size=32, norm_topk_prob=False)
    settings = dict(moe=experts, ffn_hidden_size=32, head_dim=12, qk_norm=True, joint_qk_norm=True)
    return dense(**(settings | changes))


def gemma3(**changes: object) -> ModelConfig:
    """Gemma-3-style: two layers with a window for each without, which rotates by another base and slower."""
    settings = dict(
        activation=Activation.gelu_tanh,
        tie_output=True,
        qk_norm=True,
        rope=RopeConfig(type=RopeType.linear, factor=3.0),
        local_rotary_base=500.0,
        sliding_window=6,
        sliding_layers=[0, 1, 3],
        softmax_scale=8**-0.5,
        output_soft_cap=1.5,
        zero_centered_norm=True,
        sandwich_norm=True,
        embedding_scale=48**0.5,
    )
    return dense(**(settings | changes))


def phi3_rope(head_dim: int) -> RopeConfig:
    """Phi-4-mini's rope: a divisor for each frequency of the rotated part."""
    return RopeConfig(
        type=RopeType.longrope,
        original_max_position_embeddings=128,
        attention_factor=math.sqrt(1 + math.log(4) / math.log(128)),
        short_factor=[1.0 + n * n % 5 / 2 for n in range(head_dim * 3 // 8)],
    )


def phi3(**changes: object) -> ModelConfig:
    """Phi-4-mini-style: three quarters of a head are rotated, by frequencies with a divisor each; a window everywhere.

    The context is four times the pre-training's, of which the model keeps the latter.
    """
    settings = dict(rope=phi3_rope(16), rotary_percent=0.75, hidden_size=64, tie_output=True)
    settings |= dict(sliding_window=6, sliding_layers=[0, 1, 2, 3])
    return dense(**(settings | changes))


def deepseek_v2(**changes: object) -> ModelConfig:
    """DeepSeek-V2-style: V3's attention with yarn; softmax scores, groups of experts that the best of each ranks."""
    model = deepseek_v3(yarn=True)
    assert model.moe is not None
    experts = replace(model.moe, score=RouterScore.softmax, expert_bias=False, norm_topk_prob=False)
    return replace(model, **({"moe": experts} | changes))  # type: ignore[arg-type]


def glm4_moe(**changes: object) -> ModelConfig:
    """GLM-4.5-style: heads half rotated, biases and norms on queries and keys, a dense layer, biased sigmoids."""
    experts = MoeConfig(
        num_experts=8,
        top_k=2,
        ffn_hidden_size=32,
        dense_layers=[0],
        shared_ffn_hidden_size=64,
        score=RouterScore.sigmoid,
        expert_bias=True,
        routed_scaling_factor=1.3,
    )
    return dense(**({"moe": experts, "qkv_bias": True, "qk_norm": True, "rotary_percent": 0.5} | changes))


def minimax_m2(**changes: object) -> ModelConfig:
    """MiniMax-M2-style: half of each head rotated, norms over all heads of a token, biased sigmoids, none shared."""
    experts = MoeConfig(num_experts=8, top_k=3, ffn_hidden_size=32, score=RouterScore.sigmoid, expert_bias=True)
    settings = dict(moe=experts, ffn_hidden_size=32, qk_norm=True, joint_qk_norm=True, rotary_percent=0.5)
    return dense(**(settings | changes))


def gpt_oss(**changes: object) -> ModelConfig:
    """gpt-oss-style: sinks, biases everywhere, windows in turns, yarn without rounding, a clamped and shifted gate."""
    settings = dict(
        moe=MoeConfig(num_experts=8, top_k=3, ffn_hidden_size=64),
        ffn_hidden_size=64,
        qkv_bias=True,
        linear_bias=True,
        attention_sinks=True,
        activation=Activation.quick_gelu,
        activation_clamp=7.0,
        glu_linear_offset=1.0,
        sliding_window=6,
        sliding_layers=[0, 2],
        rope=RopeConfig(
            type=RopeType.yarn, factor=4.0, original_max_position_embeddings=32, truncate=False,
            attention_factor=1 + 0.1 * math.log(4.0),
        ),
    )  # fmt: skip
    return dense(**(settings | changes))


# In the terms of a DeepSeek checkpoint.
DEEPSEEK_MSCALE = {"mscale": 0.7, "mscale_all_dim": 1.3}


def deepseek_v3(
    *, q_lora_rank: int | None = 24, interleaved: bool = True, yarn: bool = False, **changes: object
) -> ModelConfig:
    """DeepSeek-V3-style: latent attention, two dense layers, shared experts, biased sigmoids, groups of experts.

    Three groups of four experts: a group is ranked by two of its four, and not by the one that Megatron would take.
    Values are narrower than keys, and no width is another's.
    """
    mla = MlaConfig(
        q_lora_rank=q_lora_rank,
        kv_lora_rank=20,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=10,
        interleaved=interleaved,
    )
    experts = MoeConfig(
        num_experts=12,
        top_k=3,
        ffn_hidden_size=32,
        dense_layers=[0, 1],
        shared_ffn_hidden_size=64,
        score=RouterScore.sigmoid,
        expert_bias=True,
        num_groups=3,
        top_k_groups=2,
        routed_scaling_factor=1.7,
    )
    settings = dict(mla=mla, moe=experts, head_dim=20, num_query_groups=4, norm_epsilon=1e-6)
    if yarn:
        # arXiv:2309.00071, section 3.4, as DeepSeek divides it between the rotated parts and all of a head.
        partly, wholly = (1 + 0.1 * mscale * math.log(4.0) for mscale in DEEPSEEK_MSCALE.values())
        settings["softmax_scale"] = wholly**2 / math.sqrt(20)
        settings["rope"] = RopeConfig(
            type=RopeType.yarn, factor=4.0, original_max_position_embeddings=64, attention_factor=partly / wholly
        )
    return dense(**(settings | changes))


def glm4_moe_lite(**changes: object) -> ModelConfig:
    """GLM-4.7-Flash-style: V3's attention, one dense layer, experts in one group."""
    model = deepseek_v3()
    assert model.moe is not None
    experts = replace(model.moe, dense_layers=[0], num_groups=1, top_k_groups=1)
    return replace(model, **({"moe": experts} | changes))  # type: ignore[arg-type]
