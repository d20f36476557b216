"""GLM-4.5, GLM-4.5-Air and later ones of that shape: partly rotated heads, biased sigmoid routing, shared experts.

The multi-token prediction layers behind the last layer are left out: they are not part of the policy.
"""

from __future__ import annotations

from dataclasses import replace

from mcore_rl.config.model import ModelConfig, MoeConfig, RouterScore
from mcore_rl.families import rollout_blocks as rollout
from mcore_rl.families.blocks import (
    DENSE_MLP,
    ENDS,
    GROUPED_ATTENTION,
    HF_MLP,
    NORMS,
    QK_NORM,
    QKV_BIAS,
    ROUTER_BIAS,
    SHARED_EXPERTS,
    experts,
)
from mcore_rl.families.decoder import PREDICTION_LAYERS, Defaults, read_decoder
from mcore_rl.families.family import Family
from mcore_rl.families.fields import Fields
from mcore_rl.families.rules import Axis, Layers, Rule


def _qkv_bias(model: ModelConfig) -> bool:
    return model.qkv_bias


def _qk_norm(model: ModelConfig) -> bool:
    return model.qk_norm


def _optional(biases: tuple[Rule, ...], norms: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Only GLM-4.5 has norms over query and key heads, GLM-4.5-Air has not."""
    return (
        *(replace(rule, only=_qkv_bias) for rule in biases),
        *(replace(rule, only=_qk_norm) for rule in norms),
    )


# The class computes head_dim where it is missing, and vLLM does not: checkpoints write it.
DEFAULTS = Defaults(
    vocab_size=151552,
    hidden_size=4096,
    intermediate_size=10944,
    num_hidden_layers=46,
    num_attention_heads=96,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
)
PARTIAL_ROTARY_FACTOR = 0.5  # the class's default


def read(fields: Fields) -> ModelConfig:
    """Reads ``Glm4MoeConfig``, which says which of biases and norms there are."""
    model = read_decoder(fields, DEFAULTS, partial_rotary_factor=PARTIAL_ROTARY_FACTOR)
    if fields.values.get("head_dim") is None:
        fields.refuse("head_dim", "is missing, and vLLM 0.32 does not compute it", "Write the width of a head")
    fields.demand("tie_word_embeddings", False, because="ties the output to the embedding, and vLLM 0.32 does not")
    model.qkv_bias = fields.take("attention_bias", bool, False)
    model.qk_norm = fields.take("use_qk_norm", bool, False)
    width = fields.take("moe_intermediate_size", int, 1408)
    model.moe = MoeConfig(
        num_experts=fields.take("n_routed_experts", int, 128),
        top_k=fields.take("num_experts_per_tok", int, 8),
        ffn_hidden_size=width,
        norm_topk_prob=fields.take("norm_topk_prob", bool, True),
        dense_layers=list(range(min(fields.take("first_k_dense_replace", int, 1), model.num_layers))),
        shared_ffn_hidden_size=width * fields.take("n_shared_experts", int, 1),
        score=RouterScore.sigmoid,
        expert_bias=True,
        num_groups=fields.take("n_group", int, 1),
        top_k_groups=fields.take("topk_group", int, 1),
        routed_scaling_factor=fields.take("routed_scaling_factor", float, 1.0),
    )
    if model.moe.shared_ffn_hidden_size < 1:
        fields.refuse("n_shared_experts", "this family has shared experts", "Write 1 or more")
    fields.ignore(*PREDICTION_LAYERS)
    return model


WEIGHTS = (
    *ENDS,
    *NORMS,
    *GROUPED_ATTENTION,
    *_optional(QKV_BIAS, QK_NORM),
    *DENSE_MLP,
    *experts(HF_MLP),
    ROUTER_BIAS,
    *SHARED_EXPERTS,
)
ROLLOUT = (
    *rollout.ENDS,
    *rollout.NORMS,
    *rollout.GROUPED_ATTENTION,
    *_optional(rollout.QKV_BIAS, rollout.QK_NORM),
    *rollout.DENSE_MLP,
    *rollout.experts(HF_MLP, router_dtype="float32"),
    rollout.ROUTER_BIAS,
    *rollout.gated_mlp(HF_MLP + "shared_experts.", "shared_ffn", Layers.experts, Axis.tensor),
)

FAMILY = Family(
    name="glm4_moe",
    architectures=("Glm4MoeForCausalLM",),
    model_type="glm4_moe",
    read=read,
    weights=WEIGHTS,
    rollout=ROLLOUT,
    extra_layers=True,
)
