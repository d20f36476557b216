"""Qwen3, dense: a norm over each query and key head instead of biases."""

from __future__ import annotations

from mcore_rl.config.model import ModelConfig
from mcore_rl.families.blocks import DENSE_MLP, ENDS, GROUPED_ATTENTION, NORMS, QK_NORM
from mcore_rl.families.decoder import Defaults, read_decoder, window_last_layers
from mcore_rl.families.family import Family
from mcore_rl.families.fields import Fields

DEFAULTS = Defaults(
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=22016,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    head_dim=128,
    max_position_embeddings=32768,
)


def read(fields: Fields) -> ModelConfig:
    """Reads ``Qwen3Config``: windows, if on, are in the layers from ``max_window_layers``."""
    model = read_decoder(fields, DEFAULTS)
    window_last_layers(fields, model)
    model.qk_norm = True
    return model


TABLES = ENDS + NORMS + GROUPED_ATTENTION + QK_NORM + DENSE_MLP

FAMILY = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    model_type="qwen3",
    read=read,
    weights=TABLES.weights,
    rollout=TABLES.rollout,
)
