"""Llama 2 and 3, and models of the same architecture (deepseek-llm-7b-chat)."""

from __future__ import annotations

from mcore_rl.config.model import ModelConfig
from mcore_rl.families.blocks import DENSE_MLP, ENDS, GROUPED_ATTENTION, NORMS
from mcore_rl.families.decoder import Defaults, read_decoder
from mcore_rl.families.family import Family
from mcore_rl.families.fields import Fields

DEFAULTS = Defaults(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    max_position_embeddings=2048,
)


def read(fields: Fields) -> ModelConfig:
    """Reads ``LlamaConfig``, the plain decoder."""
    return read_decoder(fields, DEFAULTS)


TABLES = ENDS + NORMS + GROUPED_ATTENTION + DENSE_MLP

FAMILY = Family(
    name="llama",
    architectures=("LlamaForCausalLM",),
    model_type="llama",
    read=read,
    weights=TABLES.weights,
    rollout=TABLES.rollout,
)
