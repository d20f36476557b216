"""ERNIE-4.5, dense: Llama's tensors; the pairs that are rotated are neighbours."""

from __future__ import annotations

from mcore_rl.config.model import ModelConfig
from mcore_rl.families import llama
from mcore_rl.families.decoder import Defaults, read_decoder
from mcore_rl.families.family import Family
from mcore_rl.families.fields import Fields

DEFAULTS = Defaults(
    vocab_size=103424,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=18,
    num_attention_heads=16,
    num_key_value_heads=2,
    head_dim=128,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    tie_word_embeddings=True,
)


def read(fields: Fields) -> ModelConfig:
    """Reads ``Ernie4_5Config``, which has no biases."""
    model = read_decoder(fields, DEFAULTS)
    fields.demand("use_bias", False, None, because="adds biases to every linear layer")
    model.rotary_interleaved = True
    return model


FAMILY = Family(
    name="ernie4_5",
    architectures=("Ernie4_5ForCausalLM",),
    model_type="ernie4_5",
    read=read,
    weights=llama.TABLES.weights,
    rollout=llama.TABLES.rollout,
)
