"""Qwen3-30B-A3B and Qwen3-235B-A22B: Qwen3's attention, experts in most or all layers."""

from __future__ import annotations

from mcore_rl.config.model import ModelConfig, MoeConfig
from mcore_rl.families import qwen3
from mcore_rl.families.blocks import HF_MLP, experts
from mcore_rl.families.decoder import Defaults, read_decoder, read_dense_layers
from mcore_rl.families.family import Family
from mcore_rl.families.fields import Fields

DEFAULTS = Defaults(
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=24,
    num_attention_heads=32,
    num_key_value_heads=4,
    max_position_embeddings=32768,
)


def read(fields: Fields) -> ModelConfig:
    """Reads ``Qwen3MoeConfig`` without windows: no checkpoint has any, and transformers' versions disagree on them."""
    model = read_decoder(fields, DEFAULTS)
    fields.demand("use_sliding_window", False, because="limits attention to a window")
    fields.ignore("sliding_window", "max_window_layers")
    experts = "num_local_experts" if "num_local_experts" in fields.values else "num_experts"  # since 5, and before
    model.qk_norm = True
    model.moe = MoeConfig(
        num_experts=fields.take(experts, int, 128),
        top_k=fields.take("num_experts_per_tok", int, 8),
        ffn_hidden_size=fields.take("moe_intermediate_size", int, 768),
        norm_topk_prob=fields.take("norm_topk_prob", bool, False),
        dense_layers=read_dense_layers(fields, model.num_layers),
    )
    return model


TABLES = qwen3.TABLES + experts(HF_MLP)

FAMILY = Family(
    name="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    model_type="qwen3_moe",
    read=read,
    weights=TABLES.weights,
    rollout=TABLES.rollout,
)
