"""transformers as the independent reference: the same weights, one process, float32 or float64, eager attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from mcore_rl.config.model import Activation, MlaConfig, ModelConfig, MoeConfig, RopeType, RouterScore
from tests.support import models
from tests.support.full_weights import Weights
from tests.support.hf_gpt_oss import gpt_oss_config, gpt_oss_experts


def build(model: ModelConfig, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """A randomly initialised transformers model of the same architecture; weights large enough that errors show."""
    shared = dict(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.ffn_hidden_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_query_groups,
        head_dim=model.head_dim,
        max_position_embeddings=model.max_position_embeddings,
        rms_norm_eps=model.norm_epsilon,
        rope_parameters=rope_parameters(model),
        tie_word_embeddings=model.tie_output,
        initializer_range=0.1,
        attn_implementation="eager",
    )
    cls, config = _described(model, shared)
    torch.manual_seed(seed)
    reference = cls(config).to(dtype)
    for name, module in reference.named_modules():
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
            module.variance_epsilon = model.norm_epsilon  # transformers has 1e-6 written in for the norms of latents
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            if name.endswith("conv1d.weight"):
                parameter.copy_(0.5 * torch.randn_like(parameter))
            if name.endswith("A_log"):  # a state that is forgotten at once would show no error in it
                parameter.copy_((0.02 + 0.5 * torch.rand_like(parameter)).log())
            if name.endswith("bias"):
                parameter.copy_(0.2 * torch.randn_like(parameter))
            if name.endswith("sinks"):  # about as large as scores
                parameter.copy_(torch.randn_like(parameter))
            if name.endswith("gate_up_proj") and model.activation_clamp is not None:
                parameter.mul_(5.0)  # some beyond the clamp
        for name, buffer in reference.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn_like(buffer))
    return reference.eval()


def _described(model: ModelConfig, shared: dict[str, object]) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """transformers' class for ``model``, and its configuration."""
    if model.mla is not None and model.moe is not None and not model.moe.expert_bias:
        return DeepseekV2ForCausalLM, _deepseek_v2(model, shared)
    if model.mla is not None and model.moe is not None and model.moe.num_groups == 1:
        return Glm4MoeLiteForCausalLM, _glm4_moe_lite(model, shared)
    if model.mla is not None:
        return DeepseekV3ForCausalLM, _deepseek_v3(model, shared)
    if model.moe is not None and model.moe.expert_bias and model.joint_qk_norm:
        return MiniMaxM2ForCausalLM, _minimax_m2(model, shared)
    if model.moe is not None and model.moe.expert_bias:
        return Glm4MoeForCausalLM, _glm4_moe(model, shared)
    if model.attention_sinks:
        return GptOssForCausalLM, gpt_oss_config(model, shared)
    if model.linear_attention is not None:
        if model.moe is None:
            return Qwen3_5ForCausalLM, Qwen3_5TextConfig(**_of_axes(model, shared))
        if not model.is_linear(model.num_layers - 1):  # all that tells it from Qwen3-Next
            return Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig(**_of_axes(model, shared), **_gated_experts(model.moe))
        return Qwen3NextForCausalLM, _qwen3_next(model, shared)
    if model.moe is not None and model.moe.shared_gate:
        return Qwen2MoeForCausalLM, _qwen2_moe(model, shared)
    if model.moe is not None:
        experts = dict(num_experts_per_tok=model.moe.top_k)
        if model.joint_qk_norm:
            assert not model.moe.norm_topk_prob and model.moe.ffn_hidden_size == model.ffn_hidden_size
            return OlmoeForCausalLM, OlmoeConfig(**shared, num_experts=model.moe.num_experts, **experts)
        if model.moe.norm_topk_prob and not model.qk_norm:
            return MixtralForCausalLM, MixtralConfig(
                **(shared | {"intermediate_size": model.moe.ffn_hidden_size}),
                num_local_experts=model.moe.num_experts, **experts,
            )  # fmt: skip
        else:
            return Qwen3MoeForCausalLM, Qwen3MoeConfig(
                **shared, moe_intermediate_size=model.moe.ffn_hidden_size, num_experts=model.moe.num_experts,
                norm_topk_prob=model.moe.norm_topk_prob, mlp_only_layers=model.moe.dense_layers, **experts,
            )  # fmt: skip
    if model.rope.type is RopeType.longrope:
        return Phi3ForCausalLM, _phi3(model, shared)
    if model.sandwich_norm and model.qk_norm:
        return Gemma3ForCausalLM, _gemma3(model, shared)
    if model.sandwich_norm:
        return Gemma2ForCausalLM, _gemma2(model, shared)
    if model.sliding_window is not None:
        assert model.sliding_layers == list(range(model.num_layers)), "Mistral has the window in every layer"
        return MistralForCausalLM, MistralConfig(**shared, sliding_window=model.sliding_window)
    if model.qk_norm:
        return Qwen3ForCausalLM, Qwen3Config(**shared)
    if model.no_rope_layers:
        return SmolLM3ForCausalLM, _smollm3(model, shared)
    if model.rotary_interleaved:
        return Ernie4_5ForCausalLM, Ernie4_5Config(**shared, pad_token_id=None)  # as Gemma's
    if model.qkv_bias and model.rotary_base == models.seed_oss().rotary_base:  # all that tells it from Qwen2
        dropouts = dict(attention_dropout=0.0, residual_dropout=0.0)
        return SeedOssForCausalLM, SeedOssConfig(**shared, **dropouts, pad_token_id=None)
    if model.qkv_bias:
        return Qwen2ForCausalLM, Qwen2Config(**shared)
    return LlamaForCausalLM, LlamaConfig(**shared)


def rope_parameters(model: ModelConfig) -> dict[str, object]:
    """The field of that name in a config of transformers."""
    rope = model.rope
    values: dict[str, object] = {"rope_type": rope.type.value, "rope_theta": model.rotary_base}
    if model.rotary_percent != 1:
        values["partial_rotary_factor"] = model.rotary_percent
    if rope.type not in (RopeType.default, RopeType.longrope):
        values["factor"] = rope.factor
    if rope.type is RopeType.longrope:
        values |= {"short_factor": rope.short_factor, "long_factor": [2.0 * each for each in rope.short_factor]}
    if rope.type in (RopeType.llama3, RopeType.yarn):
        values["original_max_position_embeddings"] = rope.original_max_position_embeddings
    if rope.type is RopeType.llama3:
        values |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.type is RopeType.yarn:
        values |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        values |= models.DEEPSEEK_MSCALE if model.mla is not None else {"attention_factor": rope.attention_factor}
    return values


def _gemma2(model: ModelConfig, shared: dict[str, object]) -> Gemma2Config:
    return Gemma2Config(**shared, **_gemma(model), attn_logit_softcapping=model.attention_soft_cap)


def _gemma3(model: ModelConfig, shared: dict[str, object]) -> Gemma3TextConfig:
    assert model.attention_soft_cap is None and model.local_rotary_base is not None
    local = {"rope_type": "default", "rope_theta": model.local_rotary_base}
    ropes = {"full_attention": shared["rope_parameters"], "sliding_attention": local}
    return Gemma3TextConfig(**shared | {"rope_parameters": ropes}, **_gemma(model))


def _gemma(model: ModelConfig) -> dict[str, object]:
    """The fields that Gemma 2 and 3 share."""
    assert model.zero_centered_norm and model.activation is Activation.gelu_tanh and model.softmax_scale is not None
    assert model.embedding_scale == model.hidden_size**0.5
    sliding = ["sliding_attention" if n in model.sliding_layers else "full_attention" for n in range(model.num_layers)]
    return dict(
        query_pre_attn_scalar=round(model.softmax_scale**-2),
        sliding_window=model.sliding_window,
        layer_types=sliding,
        final_logit_softcapping=model.output_soft_cap,
        pad_token_id=None,  # else that token's embedding would get no gradient
    )


def _phi3(model: ModelConfig, shared: dict[str, object]) -> Phi3Config:
    assert model.sliding_layers == list(range(model.num_layers)), "the window is in every layer"
    assert model.max_position_embeddings == model.rope.original_max_position_embeddings
    factor = model.max_position_embeddings ** (
        model.rope.attention_factor**2 - 1
    )  # arXiv:2402.13753, its root's inverse
    return Phi3Config(
        **shared | {"max_position_embeddings": round(factor * model.max_position_embeddings)},
        original_max_position_embeddings=model.max_position_embeddings,
        sliding_window=model.sliding_window,
        pad_token_id=None,  # else that token's embedding would get no gradient
    )


def _smollm3(model: ModelConfig, shared: dict[str, object]) -> SmolLM3Config:
    rotates = [int(layer not in model.no_rope_layers) for layer in range(model.num_layers)]
    return SmolLM3Config(
        **shared, no_rope_layers=rotates, bos_token_id=1, eos_token_id=2, pad_token_id=None,
    )  # fmt: skip


def _qwen2_moe(model: ModelConfig, shared: dict[str, object]) -> Qwen2MoeConfig:
    moe = model.moe
    assert moe is not None and model.qkv_bias
    every_other = moe.dense_layers == list(range(0, model.num_layers, 2))
    return Qwen2MoeConfig(
        **shared,
        num_experts=moe.num_experts,
        num_experts_per_tok=moe.top_k,
        moe_intermediate_size=moe.ffn_hidden_size,
        shared_expert_intermediate_size=moe.shared_ffn_hidden_size,
        norm_topk_prob=moe.norm_topk_prob,
        decoder_sparse_step=2 if every_other else 1,
        mlp_only_layers=[] if every_other else moe.dense_layers,
    )


def _qwen3_next(model: ModelConfig, shared: dict[str, object]) -> Qwen3NextConfig:
    moe = model.moe
    assert moe is not None
    return Qwen3NextConfig(
        **_hybrid(model, shared),
        **_gated_experts(moe),
        norm_topk_prob=moe.norm_topk_prob,
        mlp_only_layers=moe.dense_layers,
    )


def _hybrid(model: ModelConfig, shared: dict[str, object]) -> dict[str, object]:
    """The fields of Qwen3-Next's and Qwen3.5's layers."""
    linear = model.linear_attention
    assert linear is not None and model.zero_centered_norm and model.attention_output_gate
    return shared | dict(
        layer_types=["linear_attention" if model.is_linear(n) else "full_attention" for n in range(model.num_layers)],
        linear_num_key_heads=linear.num_key_heads,
        linear_num_value_heads=linear.num_value_heads,
        linear_key_head_dim=linear.key_head_dim,
        linear_value_head_dim=linear.value_head_dim,
        linear_conv_kernel_dim=linear.conv_kernel_dim,
    )


def _of_axes(model: ModelConfig, shared: dict[str, object]) -> dict[str, object]:
    """``_hybrid`` with the positions of three axes that Qwen3.5's text parts speak of."""
    third = model.rotary_dim // 6
    axes = {"mrope_section": [model.rotary_dim // 2 - 2 * third, third, third], "mrope_interleaved": True}
    return _hybrid(model, shared) | {"rope_parameters": rope_parameters(model) | axes}


def _gated_experts(moe: MoeConfig) -> dict[str, object]:
    """The fields of experts beside a gated shared one."""
    return dict(
        num_experts=moe.num_experts,
        num_experts_per_tok=moe.top_k,
        moe_intermediate_size=moe.ffn_hidden_size,
        shared_expert_intermediate_size=moe.shared_ffn_hidden_size,
    )


def _latent(mla: MlaConfig, shared: dict[str, object]) -> dict[str, object]:
    """The fields of latent attention, beside those of all families; the width of a head is no field of these."""
    return {name: value for name, value in shared.items() if name != "head_dim"} | dict(
        q_lora_rank=mla.q_lora_rank,
        kv_lora_rank=mla.kv_lora_rank,
        qk_nope_head_dim=mla.qk_nope_head_dim,
        qk_rope_head_dim=mla.qk_rope_head_dim,
        v_head_dim=mla.v_head_dim,
    )


def _experts_behind_dense_layers(moe: MoeConfig) -> dict[str, object]:
    """The fields of DeepSeek's experts, and of those of families after it."""
    assert moe.dense_layers == list(range(len(moe.dense_layers))), "the first layers are the dense ones"
    return dict(
        n_routed_experts=moe.num_experts,
        num_experts_per_tok=moe.top_k,
        moe_intermediate_size=moe.ffn_hidden_size,
        n_shared_experts=moe.shared_ffn_hidden_size // moe.ffn_hidden_size,
        first_k_dense_replace=len(moe.dense_layers),
        n_group=moe.num_groups,
        topk_group=moe.top_k_groups,
        routed_scaling_factor=moe.routed_scaling_factor,
    )


def _deepseek_v3(model: ModelConfig, shared: dict[str, object]) -> DeepseekV3Config:
    mla, moe = model.mla, model.moe
    assert mla is not None and moe is not None and moe.score is RouterScore.sigmoid and moe.expert_bias
    return DeepseekV3Config(
        **_latent(mla, shared),
        rope_interleave=mla.interleaved,
        **_experts_behind_dense_layers(moe),
        norm_topk_prob=moe.norm_topk_prob,
    )


def _deepseek_v2(model: ModelConfig, shared: dict[str, object]) -> DeepseekV2Config:
    mla, moe = model.mla, model.moe
    assert mla is not None and moe is not None and moe.score is RouterScore.softmax and not moe.norm_topk_prob
    return DeepseekV2Config(
        **_latent(mla, shared),
        **_experts_behind_dense_layers(moe),
        topk_method="group_limited_greedy" if moe.num_groups > 1 else "greedy",
    )


def _glm4_moe(model: ModelConfig, shared: dict[str, object]) -> Glm4MoeConfig:
    moe = model.moe
    assert moe is not None and moe.score is RouterScore.sigmoid
    return Glm4MoeConfig(
        **shared,
        attention_bias=model.qkv_bias,
        use_qk_norm=model.qk_norm,
        **_experts_behind_dense_layers(moe),
        norm_topk_prob=moe.norm_topk_prob,
        num_mtp_layers=0,
    )


def _glm4_moe_lite(model: ModelConfig, shared: dict[str, object]) -> Glm4MoeLiteConfig:
    mla, moe = model.mla, model.moe
    assert mla is not None and moe is not None and moe.score is RouterScore.sigmoid and moe.expert_bias
    dense = len(moe.dense_layers)
    return Glm4MoeLiteConfig(
        **_latent(mla, shared),
        rope_interleave=mla.interleaved,
        **_experts_behind_dense_layers(moe),  # its first_k_dense_replace is vLLM's
        mlp_layer_types=["dense"] * dense + ["sparse"] * (model.num_layers - dense),
        norm_topk_prob=moe.norm_topk_prob,
    )


def _minimax_m2(model: ModelConfig, shared: dict[str, object]) -> MiniMaxM2Config:
    moe = model.moe
    assert moe is not None and moe.score is RouterScore.sigmoid and moe.norm_topk_prob and not moe.dense_layers
    assert moe.ffn_hidden_size == model.ffn_hidden_size and not moe.shared_ffn_hidden_size
    return MiniMaxM2Config(
        **shared,
        num_local_experts=moe.num_experts,
        num_experts_per_tok=moe.top_k,
        # vLLM's
        rotary_dim=model.rotary_dim,
        scoring_func="sigmoid",
        use_routing_bias=True,
    )


def full_weights(reference: PreTrainedModel, model: ModelConfig, *, gradients: bool = False) -> Weights:
    """The reference's weights (or their gradients) under Megatron's checkpoint keys, written out by hand."""

    def value(name: str) -> Tensor:
        if name.endswith("e_score_correction_bias"):
            return reference.get_buffer(name).clone()  # a buffer: the same among the gradients
        parameter = reference.get_parameter(name)
        chosen = parameter.grad if gradients else parameter
        assert chosen is not None, f"{name} has no gradient"
        return chosen.detach().float()

    full = {
        "embedding.word_embeddings.weight": value("model.embed_tokens.weight"),
        "decoder.final_layernorm.weight": value("model.norm.weight"),
    }
    if not model.tie_output:
        full["output_layer.weight"] = value("lm_head.weight")
    for layer in range(model.num_layers):
        ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        attention = _attention if model.mla is None else _latent_attention
        if model.is_linear(layer):
            attention = _linear_attention
        full |= attention(value, model, ours, theirs)
        norm = value(theirs + "post_attention_layernorm.weight")
        if model.sandwich_norm:
            full[ours + "self_attention.linear_proj.post_layernorm.weight"] = norm
            full[ours + "mlp.linear_fc2.post_layernorm.weight"] = value(theirs + "post_feedforward_layernorm.weight")
            norm = value(theirs + "pre_feedforward_layernorm.weight")
        mlp = theirs + "mlp."
        if not model.has_experts(layer):
            full[ours + "mlp.linear_fc1.layer_norm_weight"] = norm
            if model.rope.type is RopeType.longrope:
                full[ours + "mlp.linear_fc1.weight"] = value(mlp + "gate_up_proj.weight")
                full[ours + "mlp.linear_fc2.weight"] = value(mlp + "down_proj.weight")
            else:
                full |= _gated_mlp(value, ours + "mlp.", mlp)
        else:
            full[ours + "pre_mlp_layernorm.weight"] = norm
            full |= _experts(value, model, ours + "mlp.", mlp)
    return full


def _attention(value: Callable[[str], Tensor], model: ModelConfig, ours: str, theirs: str) -> Weights:
    full, attention = {}, theirs + "self_attn."
    full[ours + "self_attention.linear_qkv.layer_norm_weight"] = value(theirs + "input_layernorm.weight")
    full[ours + "self_attention.linear_proj.weight"] = value(attention + "o_proj.weight")
    if model.linear_bias:
        full[ours + "self_attention.linear_proj.bias"] = value(attention + "o_proj.bias")
    if model.attention_sinks:
        full[ours + "self_attention.core_attention.softmax_offset"] = value(attention + "sinks")
    for kind in ("weight", "bias") if model.qkv_bias else ("weight",):
        if model.rope.type is RopeType.longrope:  # Phi-3 fuses its projections
            key = model.num_query_groups * model.head_dim
            parts = list(
                value(attention + "qkv_proj.weight").split([model.num_attention_heads * model.head_dim, key, key])
            )
        else:
            parts = [value(f"{attention}{part}_proj.{kind}") for part in "qkv"]
        if model.attention_output_gate:  # behind each query head its gate; Megatron has those of a group behind them
            heads = parts[0].view(model.num_query_groups, -1, 2, model.head_dim, model.hidden_size)
            parts[0] = heads.transpose(1, 2).flatten(0, 3)
        # Megatron keeps each key/value head behind the query heads that share it.
        grouped = [part.view(model.num_query_groups, -1, *part.shape[1:]) for part in parts]
        full[f"{ours}self_attention.linear_qkv.{kind}"] = torch.cat(grouped, dim=1).flatten(0, 1)
    if model.qk_norm:
        full[ours + "self_attention.q_layernorm.weight"] = value(attention + "q_norm.weight")
        full[ours + "self_attention.k_layernorm.weight"] = value(attention + "k_norm.weight")
    return full


def _linear_attention(value: Callable[[str], Tensor], model: ModelConfig, ours: str, theirs: str) -> Weights:
    linear, attention, mine = model.linear_attention, theirs + "linear_attn.", ours + "self_attention."
    assert linear is not None
    full = {
        mine + "in_proj.layer_norm_weight": value(theirs + "input_layernorm.weight"),
        mine + "dt_bias": value(attention + "dt_bias"),
        mine + "A_log": value(attention + "A_log"),
        mine + "out_norm.weight": value(attention + "norm.weight"),
        mine + "out_proj.weight": value(attention + "out_proj.weight"),
    }
    channels = {"query": linear.key_dim, "key": linear.key_dim, "value": linear.value_dim}

    def by_channel(theirs: str, ours: str) -> Weights:
        """All channels of each part in a row."""
        parts = value(attention + theirs).split(list(channels.values()))
        return {f"{mine}{ours}.{name}": part for name, part in zip(channels, parts, strict=True)}

    full |= by_channel("conv1d.weight", "conv1d.weight")
    if model.moe is None or not model.is_linear(model.num_layers - 1):  # Qwen3.5
        others = {"z": "in_proj_z", "beta": "in_proj_b", "alpha": "in_proj_a"}
        full |= {f"{mine}in_proj.weight.{part}": value(f"{attention}{name}.weight") for part, name in others.items()}
        return full | by_channel("in_proj_qkv.weight", "in_proj.weight")
    # By key heads; Megatron's checkpoint has each part of them as a tensor of its own.
    values = linear.value_dim // linear.num_key_heads
    sizes = {"query": linear.key_head_dim, "key": linear.key_head_dim, "value": values, "z": values}
    gates = linear.num_value_heads // linear.num_key_heads
    for name, parts in (("in_proj_qkvz", sizes), ("in_proj_ba", {"beta": gates, "alpha": gates})):
        by_head = value(f"{attention}{name}.weight").view(linear.num_key_heads, -1, model.hidden_size)
        for part, tensor in zip(parts, by_head.split(list(parts.values()), dim=1), strict=True):
            full[f"{mine}in_proj.weight.{part}"] = tensor.flatten(0, 1)
    return full


def _latent_attention(value: Callable[[str], Tensor], model: ModelConfig, ours: str, theirs: str) -> Weights:
    assert model.mla is not None
    attention, latent = theirs + "self_attn.", ours + "self_attention."
    full = {
        ours + "input_layernorm.weight": value(theirs + "input_layernorm.weight"),
        latent + "linear_proj.weight": value(attention + "o_proj.weight"),
        latent + "linear_kv_down_proj.weight": value(attention + "kv_a_proj_with_mqa.weight"),
        latent + "linear_kv_up_proj.weight": value(attention + "kv_b_proj.weight"),
        latent + "linear_kv_up_proj.layer_norm_weight": value(attention + "kv_a_layernorm.weight"),
    }
    if model.mla.q_lora_rank is None:
        return full | {latent + "linear_q_proj.weight": value(attention + "q_proj.weight")}
    return full | {
        latent + "linear_q_down_proj.weight": value(attention + "q_a_proj.weight"),
        latent + "linear_q_up_proj.weight": value(attention + "q_b_proj.weight"),
        latent + "linear_q_up_proj.layer_norm_weight": value(attention + "q_a_layernorm.weight"),
    }


def _gated_mlp(value: Callable[[str], Tensor], ours: str, theirs: str) -> Weights:
    gate, up = value(theirs + "gate_proj.weight"), value(theirs + "up_proj.weight")
    down = value(theirs + "down_proj.weight")
    return {ours + "linear_fc1.weight": torch.cat([gate, up]), ours + "linear_fc2.weight": down}


def _experts(value: Callable[[str], Tensor], model: ModelConfig, ours: str, theirs: str) -> Weights:
    assert model.moe is not None
    if model.linear_bias:
        return gpt_oss_experts(value, ours, theirs)
    full = {
        ours + "router.weight": value(theirs + "gate.weight"),
        ours + "experts.experts.linear_fc1.weight": value(theirs + "experts.gate_up_proj"),
        ours + "experts.experts.linear_fc2.weight": value(theirs + "experts.down_proj"),
    }
    if model.moe.expert_bias:
        holder = theirs if model.joint_qk_norm else theirs + "gate."  # MiniMax-M2's is its block's
        full[ours + "router.expert_bias"] = value(holder + "e_score_correction_bias")
    if model.moe.shared_ffn_hidden_size:
        name = "shared_expert" if model.moe.shared_gate else "shared_experts"
        full |= _gated_mlp(value, ours + "shared_experts.", f"{theirs}{name}.")
    if model.moe.shared_gate:
        full[ours + "shared_experts.gate_weight"] = value(theirs + "shared_expert_gate.weight")
    return full
