"""GLM-4.7-Flash: DeepSeek-V3's latent attention before GLM-4.5's experts.

The multi-token prediction layers behind the last layer are left out: they are not part of the policy.
"""

from __future__ import annotations

from dataclasses import replace

from mcore_rl.config.model import MlaConfig, ModelConfig, MoeConfig, RouterScore
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
DENSE, SPARSE = "dense", "sparse"


def read(fields: Fields) -> ModelConfig:
    """Reads ``Glm4MoeLiteConfig``: experts by ``mlp_layer_types``, of which vLLM reads ``first_k_dense_replace``."""
    model = deepseek_v3.read_latent_attention(fields, DEFAULTS, LATENTS)
    model.moe = _read_experts(fields, model.num_layers)
    fields.ignore(*PREDICTION_LAYERS)
    return model


def _read_experts(fields: Fields, num_layers: int) -> MoeConfig:
    fields.demand("scoring_func", "sigmoid", because="scores experts by another function")
    fields.demand("topk_method", "noaux_tc", because="chooses experts in another way")
    fields.demand("moe_layer_freq", 1, because="leaves later layers without experts in vLLM alone")
    experts = "num_local_experts" if "num_local_experts" in fields.values else "n_routed_experts"
    width = fields.take("moe_intermediate_size", int, 1536)
    moe = MoeConfig(
        num_experts=fields.take(experts, int, 64),
        top_k=fields.take("num_experts_per_tok", int, 4),
        ffn_hidden_size=width,
        norm_topk_prob=fields.take("norm_topk_prob", bool, True),
        dense_layers=_read_dense_layers(fields, num_layers),
        shared_ffn_hidden_size=width * fields.take("n_shared_experts", int, 1),
        score=RouterScore.sigmoid,
        expert_bias=True,
        num_groups=fields.take("n_group", int, 1),
        top_k_groups=fields.take("topk_group", int, 1),
        routed_scaling_factor=fields.take("routed_scaling_factor", float, 1.8),
    )
    if moe.shared_ffn_hidden_size < 1:
        fields.refuse("n_shared_experts", "this family has shared experts", "Write 1 or more")
    return moe


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
    weights=deepseek_v3.WEIGHTS,
    rollout=_with_glm_experts(deepseek_v3.ROLLOUT),
    rollout_without_latent=_with_glm_experts(deepseek_v3.ROLLOUT_WITHOUT_LATENT),
    extra_layers=True,
)
