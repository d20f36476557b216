"""Mixtral 8x7B and 8x22B: every layer has experts."""

from __future__ import annotations

from mcore_rl.config.model import ModelConfig, MoeConfig
from mcore_rl.families.blocks import ENDS, GROUPED_ATTENTION, HF_LAYER, NORMS, experts
from mcore_rl.families.decoder import Defaults, read_decoder, window_every_layer
from mcore_rl.families.family import Family
from mcore_rl.families.fields import Fields

DEFAULTS = Defaults(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_theta=1e6,
)


def read(fields: Fields) -> ModelConfig:
    """Reads ``MixtralConfig``: experts in every layer."""
    model = read_decoder(fields, DEFAULTS)
    window_every_layer(fields, model, None)
    fields.demand("router_jitter_noise", 0, because="makes training multiply the router's input by noise")
    model.moe = MoeConfig(
        num_experts=fields.take("num_local_experts", int, 8),
        top_k=fields.take("num_experts_per_tok", int, 2),
        ffn_hidden_size=model.ffn_hidden_size,
    )
    return model


TABLES = ENDS + NORMS + GROUPED_ATTENTION + experts(HF_LAYER + "block_sparse_moe.", gate="w1", up="w3", down="w2")

FAMILY = Family(
    name="mixtral",
    architectures=("MixtralForCausalLM",),
    model_type="mixtral",
    read=read,
    weights=TABLES.weights,
    rollout=TABLES.rollout,
)
