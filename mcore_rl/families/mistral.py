"""Mistral 7B: Llama's tensors, and in its first version a window in every layer."""

from __future__ import annotations

from mcore_rl.config.model import ModelConfig
from mcore_rl.families import llama
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
)


def read(fields: Fields) -> ModelConfig:
    """Reads ``MistralConfig``: its window is 4096 if the field is missing."""
    model = read_decoder(fields, DEFAULTS)
    window_every_layer(fields, model, 4096)
    return model


FAMILY = Family(
    name="mistral",
    architectures=("MistralForCausalLM",),
    model_type="mistral",
    read=read,
    weights=llama.TABLES.weights,
    rollout=llama.TABLES.rollout,
)
