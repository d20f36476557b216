"""Gemma 2: norms before and behind attention and MLP, soft caps, alternating windows, scaled and tied embeddings.

Its norms multiply by one plus their weight, in the checkpoint and in Megatron (``ModelConfig.zero_centered_norm``), so
the weights need no conversion.
"""

from __future__ import annotations

from mcore_rl.config.model import Activation, ModelConfig
from mcore_rl.families.blocks import (
    ATTENTION,
    DENSE_MLP,
    ENDS,
    GROUPED_ATTENTION,
    HF_LAYER,
    INPUT_NORM,
    LAYER,
    NORMS,
    Tables,
    norm,
    pre_mlp_norm,
)
from mcore_rl.families.decoder import Defaults, read_layer_types, read_sizes, set_window
from mcore_rl.families.family import Family
from mcore_rl.families.fields import Fields
from mcore_rl.families.rope import read_rope
from mcore_rl.families.rules import Rule, hf

SANDWICH = (
    Rule(
        ATTENTION + "linear_proj.post_layernorm.weight",
        (hf(HF_LAYER + "post_attention_layernorm.weight", "hidden"),),
    ),
    Rule(
        LAYER + "mlp.linear_fc2.post_layernorm.weight",
        (hf(HF_LAYER + "post_feedforward_layernorm.weight", "hidden"),),
    ),
)

DEFAULTS = Defaults(
    vocab_size=256000,
    hidden_size=2304,
    intermediate_size=9216,
    num_hidden_layers=26,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)
ACTIVATION = "gelu_pytorch_tanh"
OTHER_GATE = "gates the MLP by another function"


def read(fields: Fields) -> ModelConfig:
    """Reads ``Gemma2Config``: windows in every other layer, from the first."""
    model = read_sizes(fields, DEFAULTS)
    model.head_dim = fields.take("head_dim", int, 256)
    model.rotary_base, model.rope, _ = read_rope(fields, DEFAULTS.rope_theta, model.max_position_embeddings)
    read_sandwich(fields, model)
    fields.demand("hidden_act", ACTIVATION, because=OTHER_GATE)  # older files repeat hidden_activation in it
    layers = read_layer_types(fields, model, list(range(0, model.num_layers, 2)))
    window = fields.take("sliding_window", int, 4096)
    set_window(model, window, layers)
    model.attention_soft_cap = fields.optional("attn_logit_softcapping", float, 50.0)
    model.output_soft_cap = fields.optional("final_logit_softcapping", float, 30.0)
    return model


def read_sandwich(fields: Fields, model: ModelConfig) -> None:
    """What Gemma 2 and 3 share: the gate, norms around blocks, scaled and tied embeddings, the factor on scores."""
    fields.demand("hidden_activation", ACTIVATION, because=OTHER_GATE)
    fields.demand("tie_word_embeddings", True, because="gives the output a projection of its own")
    fields.demand("use_bidirectional_attention", False, None, because="lets tokens see those behind them")
    model.activation = Activation.gelu_tanh
    model.zero_centered_norm = model.sandwich_norm = True
    model.embedding_scale = model.hidden_size**0.5
    scalar = fields.take("query_pre_attn_scalar", float, 256.0)
    if scalar <= 0:
        fields.refuse("query_pre_attn_scalar", "scores are divided by its root", "Write a positive number")
    model.softmax_scale = float(max(scalar, 1e-9) ** -0.5)


_PRE_MLP = "pre_feedforward_layernorm"
_NORMS = Tables(
    (INPUT_NORM, *pre_mlp_norm(f"{HF_LAYER}{_PRE_MLP}.weight"), *SANDWICH),
    (*NORMS.rollout, norm(_PRE_MLP), norm("post_feedforward_layernorm")),
)
TABLES = ENDS + _NORMS + GROUPED_ATTENTION + DENSE_MLP

FAMILY = Family(
    name="gemma2",
    architectures=("Gemma2ForCausalLM",),
    model_type="gemma2",
    read=read,
    weights=TABLES.weights,
    rollout=TABLES.rollout,
)
