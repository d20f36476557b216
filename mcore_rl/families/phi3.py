"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: projections fused in the checkpoint, longrope, heads that are rotated in part.

Frequencies of longrope depend on the length of the input: up to ``original_max_position_embeddings`` tokens one set,
beyond it another, by the sequence in transformers and by ``max_model_len`` in vLLM (phi3_long_rope_scaled_rope.py,
0.32).  The first set is read and the model ends where it does, so that training and rollout cannot part.
"""

from __future__ import annotations

import math
from dataclasses import replace

from mcore_rl.config.model import ModelConfig, RopeConfig, RopeType
from mcore_rl.families.blocks import (
    ATTENTION,
    ENDS,
    HF_ATTENTION,
    HF_MLP,
    LAYER,
    NORMS,
    OUTPUT_PROJECTION,
    Tables,
    alike,
    of_vllm,
)
from mcore_rl.families.decoder import Defaults, read_decoder, window_every_layer
from mcore_rl.families.family import Family
from mcore_rl.families.fields import Fields
from mcore_rl.families.rope import Reader, read_default
from mcore_rl.families.rules import Axis, Rule, Sections, grouped_qkv, hf, replicated_qkv, split

DEFAULTS = Defaults(
    vocab_size=32064,
    hidden_size=3072,
    intermediate_size=8192,
    num_hidden_layers=32,
    num_attention_heads=32,
    max_position_embeddings=4096,
    rms_norm_eps=1e-5,
)


def read(fields: Fields) -> ModelConfig:
    """Reads ``Phi3Config``; ``sliding_window`` is in every layer, unless it is null."""
    model = read_decoder(fields, DEFAULTS, partial_rotary_factor=1.0, kinds=_kinds(fields))
    width = model.hidden_size // max(model.num_attention_heads, 1)
    fields.demand("head_dim", width, None, because=f"is not {width}, by which transformers counts longrope's factors")
    model.head_dim = width
    for name in ("resid_pdrop", "embd_pdrop"):
        fields.demand(name, 0, because="makes training drop activations at random")
    # Of Microsoft's own code, for models that interleave other layers; transformers and vLLM do not read them.
    fields.demand("full_attn_mod", 1, because="has full attention in some layers only")
    fields.demand("interpolate_factor", 1, because="interpolates positions")
    fields.demand("lm_head_bias", False, because="adds a bias to the output projection")
    window_every_layer(fields, model, None)
    if model.rope.type is RopeType.longrope:
        model.max_position_embeddings = model.rope.original_max_position_embeddings
        if len(model.rope.short_factor) != model.rotary_dim // 2:
            problem = (
                f"has {len(model.rope.short_factor)} numbers in short_factor for {model.rotary_dim // 2} frequencies"
            )
            fields.refuse("rope_scaling", problem, "Restore the checkpoint's own config.json")
    return model


def _kinds(fields: Fields) -> dict[str, Reader]:
    """The rope types; longrope also by its older name."""
    trained = fields.take("original_max_position_embeddings", int, 4096)  # transformers prefers it to the one inside

    def longrope(inner: Fields, longest: int) -> tuple[RopeConfig, float]:
        return _longrope(inner, longest, max(trained, 2)), 1.0

    return {"default": read_default, "longrope": longrope, "su": longrope}


def _longrope(inner: Fields, longest: int, trained: int) -> RopeConfig:
    """``_compute_longrope_parameters`` of transformers, for sequences of at most ``trained`` tokens."""
    inner.demand("original_max_position_embeddings", trained, None, because=f"contradicts {trained} above it")
    ratio = longest / trained
    inner.demand("factor", ratio, None, because=f"is not {ratio:g}, by which vLLM 0.32 scales cosine and sine")
    inner.demand("attention_factor", None, because="scales cosine and sine, which vLLM 0.32 does not read")
    for name in ("short_mscale", "long_mscale"):
        inner.demand(name, None, because="scales cosine and sine, which transformers does not read")
    for name in ("short_factor", "long_factor"):
        if not _numbers(inner, name):
            inner.refuse(
                name, "must have a positive number for each frequency", "Restore the checkpoint's own config.json"
            )
    return RopeConfig(
        type=RopeType.longrope,
        original_max_position_embeddings=trained,
        attention_factor=math.sqrt(1 + math.log(ratio) / math.log(trained)) if ratio > 1 else 1.0,
        short_factor=_numbers(inner, "short_factor"),
    )


def _numbers(inner: Fields, name: str) -> list[float]:
    values = inner.optional(name, list) or []
    sound = all(type(value) in (int, float) and value > 0 for value in values)
    return [float(value) for value in values] if sound else []


_PARTS = ("query", "key", "key")
_QKV = Rule(
    ATTENTION + "linear_qkv.weight",
    (hf(HF_ATTENTION + "qkv_proj.weight", "query_key_value", "hidden"),),
    Sections(grouped_qkv, _PARTS),
    axis=Axis.tensor,
)
_FC1 = Rule(
    LAYER + "mlp.linear_fc1.weight",
    (hf(HF_MLP + "gate_up_proj.weight", "gate_and_up", "hidden"),),
    Sections(split, ("ffn", "ffn")),
    axis=Axis.tensor,
)
_FC2 = Rule(
    LAYER + "mlp.linear_fc2.weight",
    (hf(HF_MLP + "down_proj.weight", "hidden", "ffn"),),
    split,
    dim=1,
    axis=Axis.tensor,
)
_FUSED_QKV = Tables((_QKV,), (replace(of_vllm(_QKV), layout=Sections(replicated_qkv, _PARTS)),))
TABLES = ENDS + NORMS + _FUSED_QKV + OUTPUT_PROJECTION + alike(_FC1, _FC2)

FAMILY = Family(
    name="phi3",
    architectures=("Phi3ForCausalLM",),
    model_type="phi3",
    read=read,
    weights=TABLES.weights,
    rollout=TABLES.rollout,
)
