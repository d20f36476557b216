"""SmolLM3: Llama's tensors, and layers that do not rotate queries and keys (NoPE)."""

from __future__ import annotations

from mcore_rl.config.model import ModelConfig
from mcore_rl.families import llama
from mcore_rl.families.decoder import Defaults, read_decoder
from mcore_rl.families.family import Family
from mcore_rl.families.fields import Fields

DEFAULTS = Defaults(
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=11008,
    num_hidden_layers=36,
    num_attention_heads=16,
    num_key_value_heads=4,
    max_position_embeddings=32768,
    rope_theta=2e6,
    tie_word_embeddings=True,
)
INTERVAL = 4  # the class's default


def read(fields: Fields) -> ModelConfig:
    """Reads ``SmolLM3Config``: without ``no_rope_layers``, one in ``no_rope_layer_interval`` layers does not rotate."""
    model = read_decoder(fields, DEFAULTS)
    fields.demand("use_sliding_window", False, because="limits attention to a window")
    fields.ignore("sliding_window")
    interval = fields.take("no_rope_layer_interval", int, INTERVAL)
    rotates = fields.listed("no_rope_layers", int)
    if rotates is None and interval < 1:
        fields.refuse("no_rope_layer_interval", "one in so many layers does not rotate", "Write 2 or more")
        interval = INTERVAL
    if rotates is None:
        rotates = [(layer + 1) % interval for layer in range(model.num_layers)]
    elif len(rotates) != model.num_layers:
        problem = f"must have a 1, for a layer that rotates, or a 0 for each of the {model.num_layers} layers"
        fields.refuse("no_rope_layers", problem, "Restore the checkpoint's own config.json")
    model.no_rope_layers = [layer for layer, value in enumerate(rotates[: model.num_layers]) if not value]
    return model


FAMILY = Family(
    name="smollm3",
    architectures=("SmolLM3ForCausalLM",),
    model_type="smollm3",
    read=read,
    weights=llama.TABLES.weights,
    rollout=llama.TABLES.rollout,
)
