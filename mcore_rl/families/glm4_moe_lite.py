"""GLM-4.7-Flash: DeepSeek-V3's latent attention before GLM-4.5's experts.

The multi-token prediction layers behind the last layer are left out: they are not part of the policy.
"""

from __future__ import annotations

from dataclasses import replace

from mcore_rl.config.model import MlaConfig, ModelConfig, MoeConfig
from mcore_rl.families import deepseek_v3
from mcore_rl.families.decoder import PREDICTION_LAYERS, Defaults
from mcore_rl.families.family import Family
from mcore_rl.families.fields import Fields
from mcore_rl.families.rules import Axis, Rule

DEFAULTS = Defaults(
    vocab_size=154880,
    hidden_size=2048,
    intermediate_size=10240,
    num_hidden_layers=47,
    num_attention_heads=20,
    num_key_value_heads=20,
    max_position_embeddings=202752,
    rms_norm_eps=1e-5,
)
LATENTS = MlaConfig(q_lora_rank=768, kv_lora_rank=512, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256)
EXPERTS = MoeConfig(num_experts=64, top_k=4, ffn_hidden_size=1536, routed_scaling_factor=1.8)
DENSE = "dense"
SPARSE = "sparse"


def read(fields: Fields) -> ModelConfig:
    """Reads ``Glm4MoeLiteConfig``: experts by ``mlp_layer_types``, of which vLLM reads ``first_k_dense_replace``."""
    model = deepseek_v3.read_latent_attention(fields, DEFAULTS, LATENTS)
    model.moe = deepseek_v3.read_experts(fields, EXPERTS, _read_dense_layers(fields, model.num_layers))
    fields.ignore(*PREDICTION_LAYERS)
    return model


def _read_dense_layers(fields: Fields, num_layers: int) -> list[int]:
    """The first layers, by both names; transformers takes the first layer where ``mlp_layer_types`` is missing."""
    types = fields.listed("mlp_layer_types", str) or [DENSE, *[SPARSE] * (num_layers - 1)]
    dense = types.count(DENSE)
    if types != [DENSE] * dense + [SPARSE] * (num_layers - dense):
        problem = (
            f"must name {DENSE} for the first layers and {SPARSE} for the rest of {num_layers}, as vLLM 0.32 has it"
        )
        fields.refuse("mlp_layer_types", problem, "Choose a checkpoint with these")
    name = "first_k_dense_replace"
    first = fields.take(name, int, dense)
    if fields.values.get(name) is None:
        fields.refuse(name, "is missing, and vLLM 0.32 needs it", f"Write {dense}")
    elif first != dense:
        problem = f"stands beside mlp_layer_types of {dense} dense layers, which transformers reads"
        fields.refuse(name, problem, f"Write {dense}, or mlp_layer_types with {first}")
    return list(range(min(dense, num_layers)))


def _with_glm_experts(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """``rules`` with vLLM's Glm4MoE: the router in float32, and shared experts that are always cut."""
    router = (replace(rule, dtype="float32") if rule.name.endswith("gate.weight") else rule for rule in rules)
    return tuple(replace(rule, axis=Axis.tensor) if rule.axis is Axis.shared_expert else rule for rule in router)


FAMILY = Family(
    name="glm4_moe_lite",
    architectures=("Glm4MoeLiteForCausalLM",),
    model_type="glm4_moe_lite",
    read=read,
    weights=deepseek_v3.TABLES.weights,
    rollout=_with_glm_experts(deepseek_v3.TABLES.rollout),
    rollout_without_latent=_with_glm_experts(deepseek_v3.ROLLOUT_WITHOUT_LATENT),
    extra_layers=True,
)
