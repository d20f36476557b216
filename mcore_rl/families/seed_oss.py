"""Seed-OSS: Qwen2's biases on queries, keys and values, and heads whose width is their own."""

from __future__ import annotations

from mcore_rl.config.model import ModelConfig
from mcore_rl.families import qwen2
from mcore_rl.families.decoder import Defaults, read_decoder
from mcore_rl.families.family import Family
from mcore_rl.families.fields import Fields

DEFAULTS = Defaults(
    vocab_size=155136,
    hidden_size=4096,
    intermediate_size=27648,
    num_hidden_layers=64,
    num_attention_heads=80,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=524288,
)


def read(fields: Fields) -> ModelConfig:
    """Reads ``SeedOssConfig`` without its dropouts.

    Published files have 0.1, which transformers applies in training and vLLM never; here nothing is dropped, so that
    what is trained is what drew.
    """
    model = read_decoder(fields, DEFAULTS)
    fields.ignore("attention_dropout", "residual_dropout")
    fields.demand("attention_bias", True, because="leaves out the biases of queries, keys and values")
    fields.demand("attention_out_bias", False, because="adds a bias to the output projection")
    model.qkv_bias = True
    return model


FAMILY = Family(
    name="seed_oss",
    architectures=("SeedOssForCausalLM",),
    model_type="seed_oss",
    read=read,
    weights=qwen2.TABLES.weights,
    rollout=qwen2.TABLES.rollout,
)
