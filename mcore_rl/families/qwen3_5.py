"""Qwen3.5, dense: Qwen3-Next's layers with four projections of linear attention, and an MLP without experts.

It is the language model of multimodal checkpoints (``text_part.py``).  The layer of multi-token prediction (``mtp.*``)
is left out: it is not part of the policy.
"""

from __future__ import annotations

from mcore_rl.config.model import ModelConfig
from mcore_rl.families.blocks import ATTENTION, DENSE_MLP
from mcore_rl.families.decoder import Defaults
from mcore_rl.families.family import Family
from mcore_rl.families.fields import Fields
from mcore_rl.families.qwen3_next import (
    HF_LINEAR,
    STORED,
    hybrid,
    prediction_layer,
    read_hybrid,
)
from mcore_rl.families.rope import KINDS_OF_AXES
from mcore_rl.families.rules import Axis, Layers, Rule, Sections, hf, split

DEFAULTS = Defaults(
    vocab_size=248320,
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=32,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=256,
    max_position_embeddings=32768,
)


def read(fields: Fields) -> ModelConfig:
    """Reads the fields of ``Qwen3_5TextConfig``."""
    return read_text(fields, DEFAULTS)


def read_text(fields: Fields, defaults: Defaults) -> ModelConfig:
    """What the dense models and those with experts share."""
    model = read_hybrid(fields, defaults, KINDS_OF_AXES)
    # No model of this family mixes dense layers with those of experts; the rest is of the prediction layer, and the
    # precision of vLLM's states.
    fields.ignore("mlp_only_layers", "decoder_sparse_step")
    fields.ignore("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype")
    return model


_QKV = hf(HF_LINEAR + "in_proj_qkv.weight", "delta_qkv", "hidden")
_Z = hf(HF_LINEAR + "in_proj_z.weight", "delta_value", "hidden")
_B = hf(HF_LINEAR + "in_proj_b.weight", "delta_heads", "hidden")
_A = hf(HF_LINEAR + "in_proj_a.weight", "delta_heads", "hidden")
_SIZES = tuple(size for _, size in STORED)
_PARTS = Sections(split, _SIZES)
# All heads of each part are in a row, in the checkpoint as in Megatron and vLLM.
HYBRID = hybrid(
    Rule(ATTENTION + "in_proj.weight", (_QKV, _Z, _B, _A), _PARTS, axis=Axis.tensor, stored_parts=STORED),
    Rule(HF_LINEAR + "in_proj_qkvz.weight", (_QKV, _Z), Sections(split, _SIZES[:4]), axis=Axis.tensor),
    Rule(HF_LINEAR + "in_proj_ba.weight", (_B, _A), split, axis=Axis.tensor),
)
TABLES = HYBRID + DENSE_MLP

FAMILY = Family(
    name="qwen3_5_text",
    architectures=("Qwen3_5ForCausalLM",),
    model_type="qwen3_5_text",
    read=read,
    weights=TABLES.weights,
    rollout=TABLES.rollout,
    ignored=prediction_layer(TABLES.weights, Layers.dense),
)
