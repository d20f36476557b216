"""Gemma 3, text: the sandwich of norms of Gemma 2 without soft caps on scores, and a norm over each query and key head.

Five layers with a window stand for each without one, and rotate by another base.
"""

from __future__ import annotations

from mcore_rl.config.model import ModelConfig, RopeConfig
from mcore_rl.families import gemma2
from mcore_rl.families.blocks import QK_NORM
from mcore_rl.families.decoder import Defaults, read_layer_types, read_sizes, set_window
from mcore_rl.families.family import Family
from mcore_rl.families.fields import Fields
from mcore_rl.families.rope import Reader, read_default, read_linear, read_parameters, read_rope

DEFAULTS = Defaults(
    vocab_size=262208,
    hidden_size=2304,
    intermediate_size=9216,
    num_hidden_layers=26,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    max_position_embeddings=131072,
    rope_theta=1e6,
    tie_word_embeddings=True,
)
_GLOBAL_KINDS: dict[str, Reader] = {"default": read_default, "linear": read_linear}
_LOCAL_KINDS: dict[str, Reader] = {"default": read_default}


def read(fields: Fields) -> ModelConfig:
    """Reads ``Gemma3TextConfig``: every ``sliding_window_pattern``-th layer sees all tokens."""
    model = read_sizes(fields, DEFAULTS)
    model.head_dim = fields.take("head_dim", int, 256)
    if model.num_attention_heads >= 1 and model.hidden_size % model.num_attention_heads:
        problem = f"num_attention_heads={model.num_attention_heads} does not divide it, which transformers demands"
        fields.refuse("hidden_size", problem, "Restore the checkpoint's own config.json")
    model.rotary_base, model.rope, model.local_rotary_base = _read_ropes(fields, model.max_position_embeddings)
    gemma2.read_sandwich(fields, model)
    fields.demand(
        "attn_logit_softcapping", None, because="caps scores, which transformers and vLLM 0.32 do not read here"
    )
    fields.ignore("_sliding_window_pattern")  # transformers' own note; it reads the one without the underscore
    pattern = fields.take("sliding_window_pattern", int, 6)
    if pattern < 1:
        fields.refuse("sliding_window_pattern", "every so many layers see all tokens", "Write 1 or more")
    sliding = [layer for layer in range(model.num_layers) if (layer + 1) % max(pattern, 1)]
    set_window(model, fields.take("sliding_window", int, 4096), read_layer_types(fields, model, sliding))
    if not model.sliding_layers:
        model.local_rotary_base = None
    model.output_soft_cap = fields.optional("final_logit_softcapping", float)
    model.qk_norm = True
    return model


def _read_ropes(fields: Fields, longest: int) -> tuple[float, RopeConfig, float]:
    """(base and rope of layers without a window, base of those with one), in transformers' older and newer spelling."""
    local = fields.take("rope_local_base_freq", float, 10000.0)
    both = fields.inside("rope_parameters")
    if both is None:
        base, rope, _ = read_rope(fields, DEFAULTS.rope_theta, longest, kinds=_GLOBAL_KINDS)
        return base, rope, local
    fields.demand("rope_scaling", None, because="stands beside another rope_parameters")
    base = fields.take("rope_theta", float, DEFAULTS.rope_theta)
    rope = RopeConfig()
    for name, top in (("full_attention", "rope_theta"), ("sliding_attention", "rope_local_base_freq")):
        inner = both.inside(name)
        if inner is None:
            continue
        is_global = name == "full_attention"
        given = base if is_global else local
        theta, changed, _ = read_parameters(inner, given, longest, _GLOBAL_KINDS if is_global else _LOCAL_KINDS)
        if top in fields.values and theta != given:
            fields.refuse(top, f"stands beside rope_parameters.{name}.rope_theta={theta}", "Keep one of the two")
        base, rope, local = (theta, changed, local) if is_global else (base, rope, theta)
        both.close(inner)
    fields.close(both)
    return base, rope, local


TABLES = gemma2.TABLES + QK_NORM

FAMILY = Family(
    name="gemma3_text",
    architectures=("Gemma3ForCausalLM",),
    model_type="gemma3_text",
    read=read,
    weights=TABLES.weights,
    rollout=TABLES.rollout,
)
