"""OLMoE: experts in every layer, and a norm over all query heads at once and one over all key heads."""

from __future__ import annotations

from mcore_rl.config.model import ModelConfig, MoeConfig
from mcore_rl.families.blocks import ENDS, GROUPED_ATTENTION, HF_MLP, JOINT_QK_NORM, NORMS, Tables, experts, same
from mcore_rl.families.decoder import Defaults, demand_plain_heads, read_decoder
from mcore_rl.families.family import Family
from mcore_rl.families.fields import Fields

DEFAULTS = Defaults(
    vocab_size=50304,
    hidden_size=2048,
    intermediate_size=2048,
    num_hidden_layers=16,
    num_attention_heads=16,
    max_position_embeddings=4096,
    rms_norm_eps=1e-5,
)


def read(fields: Fields) -> ModelConfig:
    """Reads ``OlmoeConfig``; refuses what vLLM's models/olmoe.py (0.32) does not read."""
    model = read_decoder(fields, DEFAULTS)
    demand_plain_heads(fields, model)
    fields.demand("rms_norm_eps", 1e-5, because="is not 1e-5, which vLLM 0.32 has written in")
    fields.demand("norm_topk_prob", False, because="renormalises the experts' weights, which vLLM 0.32 never does here")
    fields.demand("clip_qkv", None, because="clips queries, keys and values, which vLLM 0.32 does not read")
    fields.demand("tie_word_embeddings", False, because="ties the output projection, which vLLM 0.32 does not read")
    model.qk_norm = model.joint_qk_norm = True
    model.moe = MoeConfig(
        num_experts=fields.take("num_experts", int, 64),
        top_k=fields.take("num_experts_per_tok", int, 8),
        ffn_hidden_size=model.ffn_hidden_size,
        norm_topk_prob=False,
    )
    return model


# vLLM keeps the norms over all heads on every rank.
_WHOLE_NORMS = Tables(JOINT_QK_NORM.weights, tuple(same(rule.hf[0]) for rule in JOINT_QK_NORM.weights))
TABLES = ENDS + NORMS + GROUPED_ATTENTION + _WHOLE_NORMS + experts(HF_MLP)

FAMILY = Family(
    name="olmoe",
    architectures=("OlmoeForCausalLM",),
    model_type="olmoe",
    read=read,
    weights=TABLES.weights,
    rollout=TABLES.rollout,
)
