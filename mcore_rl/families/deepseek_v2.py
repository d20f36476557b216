"""DeepSeek-V2 and V2-Lite: V3's latent attention and shared experts, chosen by softmax scores without a bias.

``greedy`` chooses the best experts of all, ``group_limited_greedy`` those of the best groups; a group is as good as its
best expert.
"""

from __future__ import annotations

from mcore_rl.config.model import ModelConfig, MoeConfig
from mcore_rl.families import deepseek_v3
from mcore_rl.families.blocks import ROUTER_BIAS
from mcore_rl.families.decoder import Defaults
from mcore_rl.families.family import Family
from mcore_rl.families.fields import Fields
from mcore_rl.families.rules import Rule

DEFAULTS = Defaults(
    vocab_size=102400,
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    max_position_embeddings=2048,
)
GREEDY = "greedy"
GROUPED = "group_limited_greedy"


def read(fields: Fields) -> ModelConfig:
    """Reads ``DeepseekV2Config``, and the fields that only the checkpoint's own code has."""
    model = deepseek_v3.read_latent_attention(fields, DEFAULTS)
    model.moe = _read_experts(fields, model.num_layers)
    return model


def _read_experts(fields: Fields, num_layers: int) -> MoeConfig:
    fields.demand("scoring_func", "softmax", because="scores experts by another function")
    fields.demand("moe_layer_freq", 1, because="leaves later layers without experts")
    fields.demand("norm_topk_prob", False, because="renormalises weights in vLLM 0.32 alone")
    for name in ("num_experts_per_tok", "n_group", "topk_group"):
        if fields.values.get(name) is None:
            fields.sound = False
            fields.refuse(name, "is missing, and transformers' class has no default", "Write the checkpoint's own")
    method = fields.take("topk_method", str, GREEDY)
    num_groups = fields.optional("n_group", int) or 1
    top_k_groups = fields.optional("topk_group", int) or 1
    if method not in (GREEDY, GROUPED):
        fields.refuse(
            "topk_method", "chooses experts in another way", f"Choose a checkpoint with {GREEDY} or {GROUPED}"
        )
    elif method == GREEDY and num_groups != 1:
        problem = f"stands beside topk_method={GREEDY}, which has no groups in transformers, and has them in vLLM 0.32"
        fields.refuse("n_group", problem, "Write 1")
    width = fields.take("moe_intermediate_size", int, 1407)
    moe = MoeConfig(
        num_experts=fields.take("n_routed_experts", int, 64),
        top_k=fields.optional("num_experts_per_tok", int) or 1,
        ffn_hidden_size=width,
        norm_topk_prob=False,
        dense_layers=list(range(min(fields.take("first_k_dense_replace", int, 0), num_layers))),
        shared_ffn_hidden_size=width * fields.take("n_shared_experts", int, 2),
        num_groups=num_groups,
        top_k_groups=top_k_groups,
        routed_scaling_factor=fields.take("routed_scaling_factor", float, 1.0),
    )
    if moe.shared_ffn_hidden_size < 1:
        fields.refuse("n_shared_experts", "this family has shared experts", "Write 1 or more")
    return moe


def _without_bias(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    return tuple(rule for rule in rules if rule not in ROUTER_BIAS.weights + ROUTER_BIAS.rollout)


FAMILY = Family(
    name="deepseek_v2",
    architectures=("DeepseekV2ForCausalLM",),
    model_type="deepseek_v2",
    read=read,
    weights=_without_bias(deepseek_v3.TABLES.weights),
    rollout=_without_bias(deepseek_v3.TABLES.rollout),
    rollout_without_latent=_without_bias(deepseek_v3.ROLLOUT_WITHOUT_LATENT),
)
