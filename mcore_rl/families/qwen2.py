"""Qwen2 and Qwen2.5: biases on queries, keys and values; the small ones are tied."""

from __future__ import annotations

from mcore_rl.config.model import ModelConfig
from mcore_rl.families.blocks import DENSE_MLP, ENDS, GROUPED_ATTENTION, NORMS, QKV_BIAS
from mcore_rl.families.decoder import Defaults, demand_plain_heads, read_decoder, window_last_layers
from mcore_rl.families.family import Family
from mcore_rl.families.fields import Fields

DEFAULTS = Defaults(
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=22016,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    max_position_embeddings=32768,
)


def read(fields: Fields) -> ModelConfig:
    """Reads ``Qwen2Config``: windows, if on, are in the layers from ``max_window_layers``."""
    model = read_decoder(fields, DEFAULTS)
    demand_plain_heads(fields, model)
    window_last_layers(fields, model)
    model.qkv_bias = True
    return model


TABLES = ENDS + NORMS + GROUPED_ATTENTION + QKV_BIAS + DENSE_MLP

FAMILY = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    model_type="qwen2",
    read=read,
    weights=TABLES.weights,
    rollout=TABLES.rollout,
)
