"""DeepSeek-V3 and R1, Moonlight, Kimi-K2: latent attention, dense first layers, small experts, biased sigmoid scores.

The multi-token prediction layers behind the last layer are left out: they are not part of the policy.
"""

from __future__ import annotations

from dataclasses import replace

from mcore_rl.config.model import MlaConfig, ModelConfig, MoeConfig, RouterScore
from mcore_rl.families.blocks import (
    ATTENTION,
    DENSE_MLP,
    ENDS,
    HF_ATTENTION,
    HF_MLP,
    ROUTER_BIAS,
    UNFUSED_NORMS,
    Tables,
    experts,
    of_vllm,
    shared_experts,
)
from mcore_rl.families.decoder import PREDICTION_LAYERS, Defaults, read_sizes
from mcore_rl.families.family import Family
from mcore_rl.families.fields import Fields
from mcore_rl.families.rope import LATENT_KINDS, read_rope
from mcore_rl.families.rules import Axis, Rule, hf, split


def _query_latent(model: ModelConfig) -> bool:
    return model.mla is not None and model.mla.q_lora_rank is not None


def _query_at_once(model: ModelConfig) -> bool:
    return not _query_latent(model)


_QUERY = Rule(
    ATTENTION + "linear_q_proj.weight",
    (hf(HF_ATTENTION + "q_proj.weight", "query", "hidden"),),
    split,
    axis=Axis.tensor,
    only=_query_at_once,
)
_QUERY_DOWN = Rule(
    ATTENTION + "linear_q_down_proj.weight",
    (hf(HF_ATTENTION + "q_a_proj.weight", "query_latent", "hidden"),),
    only=_query_latent,
)
_QUERY_NORM = Rule(
    ATTENTION + "q_layernorm.weight",
    (hf(HF_ATTENTION + "q_a_layernorm.weight", "query_latent"),),
    only=_query_latent,
    checkpoint=ATTENTION + "linear_q_up_proj.layer_norm_weight",
)
_QUERY_UP = Rule(
    ATTENTION + "linear_q_up_proj.weight",
    (hf(HF_ATTENTION + "q_b_proj.weight", "query", "query_latent"),),
    split,
    axis=Axis.tensor,
    only=_query_latent,
)
_LATENT_DOWN = Rule(
    ATTENTION + "linear_kv_down_proj.weight",
    (hf(HF_ATTENTION + "kv_a_proj_with_mqa.weight", "latent_and_rope", "hidden"),),
)
_LATENT_NORM = Rule(
    ATTENTION + "kv_layernorm.weight",
    (hf(HF_ATTENTION + "kv_a_layernorm.weight", "latent"),),
    checkpoint=ATTENTION + "linear_kv_up_proj.layer_norm_weight",
)
_LATENT_UP = Rule(
    ATTENTION + "linear_kv_up_proj.weight",
    (hf(HF_ATTENTION + "kv_b_proj.weight", "key_and_value", "latent"),),
    split,
    axis=Axis.tensor,
)
_OUTPUT = Rule(
    ATTENTION + "linear_proj.weight",
    (hf(HF_ATTENTION + "o_proj.weight", "hidden", "value"),),
    split,
    dim=1,
    axis=Axis.tensor,
)
LATENT_ATTENTION = Tables(
    (_QUERY, _QUERY_DOWN, _QUERY_NORM, _QUERY_UP, _LATENT_DOWN, _LATENT_NORM, _LATENT_UP, _OUTPUT),
    tuple(map(of_vllm, (_QUERY_NORM, _QUERY_UP, _QUERY, _LATENT_NORM, _LATENT_UP, _OUTPUT))),
)
DEFAULTS = Defaults(
    vocab_size=129280,
    hidden_size=7168,
    intermediate_size=18432,
    num_hidden_layers=61,
    num_attention_heads=128,
    num_key_value_heads=128,
    max_position_embeddings=4096,
)
LATENTS = MlaConfig(q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
EXPERTS = MoeConfig(
    num_experts=256, top_k=8, ffn_hidden_size=2048, num_groups=8, top_k_groups=4, routed_scaling_factor=2.5
)


def read(fields: Fields) -> ModelConfig:
    """Reads ``DeepseekV3Config``, and the fields that only the checkpoint's own code has."""
    model = read_latent_attention(fields, DEFAULTS)
    dense = min(fields.take("first_k_dense_replace", int, 3), model.num_layers)
    model.moe = read_experts(fields, EXPERTS, list(range(dense)))
    fields.ignore(*PREDICTION_LAYERS)
    return model


def read_latent_attention(fields: Fields, defaults: Defaults, latents: MlaConfig = LATENTS) -> ModelConfig:
    """The sizes, positions and latent attention of DeepSeek-V2 and V3; the family adds the experts.

    latents: the widths that the configuration class has where the file has none.

    ``rms_norm_eps`` is that of every norm, as in vLLM and Megatron.  transformers' norms of the latents have 1e-6
    whatever it says, which differs for Moonlight's and GLM-4.7-Flash's 1e-5.
    """
    model = read_sizes(fields, defaults)
    fields.demand("hidden_act", "silu", because="gates the MLP by another function")
    fields.demand("tie_word_embeddings", False, because="leaves the output projection of vLLM 0.32 without weights")
    if model.num_query_groups != model.num_attention_heads:
        problem = f"is {model.num_query_groups}, and each of num_attention_heads={model.num_attention_heads} has a key"
        fields.refuse("num_key_value_heads", problem, f"Write {model.num_attention_heads}")
        model.num_query_groups = model.num_attention_heads
    fields.demand("rope_interleave", True, because="pairs rotated dimensions in a way that vLLM 0.32 does not")
    model.mla = _read_latents(fields, latents)
    width = model.mla.qk_nope_head_dim
    rotated = model.mla.qk_rope_head_dim
    model.head_dim = width + rotated
    fields.demand("head_dim", rotated, None, because="contradicts qk_rope_head_dim")
    fields.demand("qk_head_dim", model.head_dim, because="contradicts qk_nope_head_dim and qk_rope_head_dim")
    longest = model.max_position_embeddings
    model.rotary_base, model.rope, scale = read_rope(fields, defaults.rope_theta, longest, kinds=LATENT_KINDS)
    if scale != 1:
        model.softmax_scale = model.head_dim**-0.5 * scale  # ``yarn_apply_mscale`` in modeling_deepseek_v3.py
    return model


def _read_latents(fields: Fields, defaults: MlaConfig) -> MlaConfig:
    return MlaConfig(
        q_lora_rank=fields.optional("q_lora_rank", int, defaults.q_lora_rank),
        kv_lora_rank=fields.take("kv_lora_rank", int, defaults.kv_lora_rank),
        qk_nope_head_dim=fields.take("qk_nope_head_dim", int, defaults.qk_nope_head_dim),
        qk_rope_head_dim=fields.take("qk_rope_head_dim", int, defaults.qk_rope_head_dim),
        v_head_dim=fields.take("v_head_dim", int, defaults.v_head_dim),
    )


def read_experts(fields: Fields, defaults: MoeConfig, dense_layers: list[int]) -> MoeConfig:
    """Experts chosen by biased sigmoids, beside shared ones.  defaults: those of the configuration class."""
    fields.demand("scoring_func", "sigmoid", because="scores experts by another function")
    fields.demand("topk_method", "noaux_tc", because="chooses experts in another way")
    fields.demand("moe_layer_freq", 1, because="leaves later layers without experts")
    name = "num_local_experts" if "num_local_experts" in fields.values else "n_routed_experts"
    return read_biased_experts(fields, name, defaults, dense_layers)


def read_biased_experts(fields: Fields, name: str, defaults: MoeConfig, dense_layers: list[int]) -> MoeConfig:
    """``read_experts``, of which nothing says how they are chosen.  name: of the number of experts."""
    width = fields.take("moe_intermediate_size", int, defaults.ffn_hidden_size)
    moe = MoeConfig(
        num_experts=fields.take(name, int, defaults.num_experts),
        top_k=fields.take("num_experts_per_tok", int, defaults.top_k),
        ffn_hidden_size=width,
        norm_topk_prob=fields.take("norm_topk_prob", bool, True),
        dense_layers=dense_layers,
        shared_ffn_hidden_size=width * fields.take("n_shared_experts", int, 1),
        score=RouterScore.sigmoid,
        expert_bias=True,
        num_groups=fields.take("n_group", int, defaults.num_groups),
        top_k_groups=fields.take("topk_group", int, defaults.top_k_groups),
        routed_scaling_factor=fields.take("routed_scaling_factor", float, defaults.routed_scaling_factor),
    )
    if moe.shared_ffn_hidden_size < 1:
        fields.refuse("n_shared_experts", "this family has shared experts", "Write 1 or more")
    return moe


_TABLES = (
    ENDS
    + UNFUSED_NORMS
    + LATENT_ATTENTION
    + DENSE_MLP
    + experts(HF_MLP)
    + ROUTER_BIAS
    + shared_experts(Axis.shared_expert)
)
# vLLM's latent attention fuses the two down projections, whole on every rank (DeepSeekV2FusedQkvAProjLinear).
_FUSED = (
    Rule(HF_ATTENTION + "fused_qkv_a_proj.weight", _QUERY_DOWN.hf + _LATENT_DOWN.hf, only=_query_latent),
    replace(of_vllm(_LATENT_DOWN), only=_query_at_once),
)
TABLES = _TABLES + Tables((), _FUSED)
ROLLOUT_WITHOUT_LATENT = (*_TABLES.rollout, of_vllm(_QUERY_DOWN), of_vllm(_LATENT_DOWN))

FAMILY = Family(
    name="deepseek_v3",
    architectures=("DeepseekV3ForCausalLM",),
    model_type="deepseek_v3",
    other_model_types=("kimi_k2",),
    read=read,
    weights=TABLES.weights,
    rollout=TABLES.rollout,
    rollout_without_latent=ROLLOUT_WITHOUT_LATENT,
    extra_layers=True,
)
