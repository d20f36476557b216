"""MiniMax-M2, M2.1, M2.5 and M2.7: experts in every layer by biased sigmoids, norms over all heads, heads half rotated.

The layers of multi-token prediction behind the last layer are left out: they are not part of the policy.
"""

from __future__ import annotations

from mcore_rl.config.model import ModelConfig, MoeConfig, RouterScore
from mcore_rl.families.blocks import ENDS, GROUPED_ATTENTION, HF_LAYER, JOINT_QK_NORM, NORMS, experts, router_bias
from mcore_rl.families.decoder import Defaults, demand_untied, read_decoder
from mcore_rl.families.family import Family
from mcore_rl.families.fields import Fields

DEFAULTS = Defaults(
    vocab_size=200064,
    hidden_size=3072,
    intermediate_size=1536,
    num_hidden_layers=62,
    num_attention_heads=48,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=196608,
    rope_theta=5e6,
)
FULL = 1  # what ``attn_type_list`` calls a layer of full attention


def read(fields: Fields) -> ModelConfig:
    """Reads ``MiniMaxM2Config``; refuses what vLLM's models/minimax_m2.py (0.32) reads otherwise."""
    for name, value in (("rotary_dim", "64"), ("scoring_func", "sigmoid"), ("use_routing_bias", "true")):
        if fields.values.get(name) is None:
            fields.refuse(name, "is missing, and vLLM 0.32 needs it", f"Write {value}, as published checkpoints do")
    rotated = fields.take("rotary_dim", int, 64)
    width = fields.values.get("head_dim") if isinstance(fields.values.get("head_dim"), int) else DEFAULTS.head_dim
    model = read_decoder(fields, DEFAULTS, partial_rotary_factor=rotated / (width or 1))
    if model.rotary_percent * model.head_dim != rotated:
        fields.refuse("partial_rotary_factor", f"stands beside rotary_dim={rotated}", "Keep one of the two")
    fields.demand("scoring_func", "sigmoid", because="scores experts by another function in vLLM alone")
    fields.demand("use_routing_bias", True, because="leaves out the bias of experts in vLLM alone")
    demand_untied(fields)
    fields.demand("router_jitter_noise", 0, because="makes training multiply the router's input by noise")
    if set(fields.listed("attn_type_list", int) or [FULL]) != {FULL}:
        fields.refuse("attn_type_list", "gives layers linear attention", f"Choose a checkpoint with {FULL} alone")
    fields.ignore("num_mtp_modules", "use_mtp", "mtp_transformer_layers")
    model.qk_norm = model.joint_qk_norm = True
    model.moe = MoeConfig(
        num_experts=fields.take("num_local_experts", int, 256),
        top_k=fields.take("num_experts_per_tok", int, 8),
        ffn_hidden_size=model.ffn_hidden_size,
        score=RouterScore.sigmoid,
        expert_bias=True,
    )
    return model


_EXPERTS = HF_LAYER + "block_sparse_moe."
TABLES = (
    ENDS
    + NORMS
    + GROUPED_ATTENTION
    + JOINT_QK_NORM  # which vLLM cuts with the heads, too (MiniMaxText01RMSNormTP)
    + experts(_EXPERTS, gate="w1", up="w3", down="w2", router_dtype="float32")
    + router_bias(_EXPERTS + "e_score_correction_bias")
)

FAMILY = Family(
    name="minimax_m2",
    architectures=("MiniMaxM2ForCausalLM",),
    model_type="minimax_m2",
    read=read,
    weights=TABLES.weights,
    rollout=TABLES.rollout,
    extra_layers=True,
)
