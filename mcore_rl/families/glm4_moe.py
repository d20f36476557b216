"""GLM-4.5, GLM-4.5-Air and later ones of that shape: partly rotated heads, biased sigmoid routing, shared experts.

The multi-token prediction layers behind the last layer are left out: they are not part of the policy.
"""

from __future__ import annotations

from mcore_rl.config.model import ModelConfig, MoeConfig
from mcore_rl.families import deepseek_v3
from mcore_rl.families.blocks import (
    DENSE_MLP,
    ENDS,
    GROUPED_ATTENTION,
    HF_MLP,
    NORMS,
    QK_NORM,
    QKV_BIAS,
    ROUTER_BIAS,
    experts,
    shared_experts,
)
from mcore_rl.families.decoder import PREDICTION_LAYERS, Defaults, demand_untied, read_decoder
from mcore_rl.families.family import Family
from mcore_rl.families.fields import Fields
from mcore_rl.families.rules import Axis


def _qkv_bias(model: ModelConfig) -> bool:
    return model.qkv_bias


def _qk_norm(model: ModelConfig) -> bool:
    return model.qk_norm


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
EXPERTS = MoeConfig(num_experts=128, top_k=8, ffn_hidden_size=1408)
PARTIAL_ROTARY_FACTOR = 0.5  # the class's default


def read(fields: Fields) -> ModelConfig:
    """Reads ``Glm4MoeConfig``, which says which of biases and norms there are."""
    model = read_decoder(fields, DEFAULTS, partial_rotary_factor=PARTIAL_ROTARY_FACTOR)
    if fields.values.get("head_dim") is None:
        fields.refuse("head_dim", "is missing, and vLLM 0.32 does not compute it", "Write the width of a head")
    demand_untied(fields)
    model.qkv_bias = fields.take("attention_bias", bool, False)
    model.qk_norm = fields.take("use_qk_norm", bool, False)
    dense = min(fields.take("first_k_dense_replace", int, 1), model.num_layers)
    model.moe = deepseek_v3.read_biased_experts(fields, "n_routed_experts", EXPERTS, list(range(dense)))
    fields.ignore(*PREDICTION_LAYERS)
    return model


TABLES = (
    ENDS
    + NORMS
    + GROUPED_ATTENTION
    + QKV_BIAS.replaced(only=_qkv_bias)
    + QK_NORM.replaced(only=_qk_norm)  # which GLM-4.5 has, and GLM-4.5-Air has not
    + DENSE_MLP
    + experts(HF_MLP, router_dtype="float32")
    + ROUTER_BIAS
    + shared_experts(Axis.tensor)
)

FAMILY = Family(
    name="glm4_moe",
    architectures=("Glm4MoeForCausalLM",),
    model_type="glm4_moe",
    read=read,
    weights=TABLES.weights,
    rollout=TABLES.rollout,
    extra_layers=True,
)
