"""Qwen3.5 with experts: the layers of the dense models, and experts beside a gated shared one in each.

Checkpoints have the experts of a layer as transformers' modules have them (``checkpoints/stacked.py``).
"""

from __future__ import annotations

from mcore_rl.config.model import ModelConfig, MoeConfig
from mcore_rl.families import qwen2_moe, qwen3_5
from mcore_rl.families.decoder import Defaults
from mcore_rl.families.family import Family
from mcore_rl.families.fields import Fields
from mcore_rl.families.qwen3_next import EXPERTS_TABLES, prediction_layer
from mcore_rl.families.rules import Layers

DEFAULTS = Defaults(
    vocab_size=248320,
    hidden_size=2048,
    intermediate_size=512,  # that of an expert: no layer has another MLP
    num_hidden_layers=40,
    num_attention_heads=16,
    num_key_value_heads=2,
    head_dim=256,
    max_position_embeddings=32768,
)
EXPERTS = MoeConfig(num_experts=256, top_k=8, ffn_hidden_size=512, shared_ffn_hidden_size=512)


def read(fields: Fields) -> ModelConfig:
    """Reads ``Qwen3_5MoeTextConfig``, whose experts' weights are always normalised."""
    model = qwen3_5.read_text(fields, DEFAULTS)
    fields.demand("norm_topk_prob", True, because="leaves the weights of experts as they are in vLLM alone")
    model.moe = qwen2_moe.read_experts(fields, EXPERTS)
    model.ffn_hidden_size = model.moe.ffn_hidden_size
    return model


TABLES = qwen3_5.HYBRID + EXPERTS_TABLES
_STACKED = tuple(f"mtp.layers.{{l}}.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj"))

FAMILY = Family(
    name="qwen3_5_moe_text",
    architectures=("Qwen3_5MoeForCausalLM",),
    model_type="qwen3_5_moe_text",
    read=read,
    weights=TABLES.weights,
    rollout=TABLES.rollout,
    ignored=(*prediction_layer(TABLES.weights, Layers.experts), *_STACKED),
)
