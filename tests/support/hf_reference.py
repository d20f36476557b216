"""transformers as the independent reference: the same weights, one process, float32 or float64, eager attention."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from mcore_rl.config.model import ModelConfig
from tests.support.full_weights import Weights


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
        rope_parameters={"rope_type": "default", "rope_theta": model.rotary_base},
        tie_word_embeddings=model.tie_output,
        initializer_range=0.1,
        attn_implementation="eager",
    )
    if model.moe is not None:
        experts = dict(num_experts_per_tok=model.moe.top_k)
        if model.moe.norm_topk_prob and not model.qk_norm:
            cls, config = MixtralForCausalLM, MixtralConfig(
                **(shared | {"intermediate_size": model.moe.ffn_hidden_size}),
                num_local_experts=model.moe.num_experts, **experts,
            )  # fmt: skip
        else:
            cls, config = Qwen3MoeForCausalLM, Qwen3MoeConfig(
                **shared, moe_intermediate_size=model.moe.ffn_hidden_size, num_experts=model.moe.num_experts,
                norm_topk_prob=model.moe.norm_topk_prob, **experts,
            )  # fmt: skip
    elif model.qk_norm:
        cls, config = Qwen3ForCausalLM, Qwen3Config(**shared)
    elif model.qkv_bias:
        cls, config = Qwen2ForCausalLM, Qwen2Config(**shared)
    else:
        cls, config = LlamaForCausalLM, LlamaConfig(**shared)
    torch.manual_seed(seed)
    reference = cls(config).to(dtype)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            if name.endswith("bias"):
                parameter.copy_(0.2 * torch.randn_like(parameter))
    return reference.eval()


def full_weights(reference: PreTrainedModel, model: ModelConfig, *, gradients: bool = False) -> Weights:
    """The reference's weights (or their gradients) under Megatron's checkpoint keys, written out by hand."""

    def value(name: str) -> Tensor:
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
        attention = theirs + "self_attn."
        full[ours + "self_attention.linear_qkv.layer_norm_weight"] = value(theirs + "input_layernorm.weight")
        full[ours + "self_attention.linear_proj.weight"] = value(attention + "o_proj.weight")
        for kind in ("weight", "bias") if model.qkv_bias else ("weight",):
            parts = [value(f"{attention}{part}_proj.{kind}") for part in "qkv"]
            # Megatron keeps each key/value head behind the query heads that share it.
            grouped = [part.view(model.num_query_groups, -1, *part.shape[1:]) for part in parts]
            full[f"{ours}self_attention.linear_qkv.{kind}"] = torch.cat(grouped, dim=1).flatten(0, 1)
        if model.qk_norm:
            full[ours + "self_attention.q_layernorm.weight"] = value(attention + "q_norm.weight")
            full[ours + "self_attention.k_layernorm.weight"] = value(attention + "k_norm.weight")
        norm = value(theirs + "post_attention_layernorm.weight")
        if model.moe is None:
            gate, up = value(theirs + "mlp.gate_proj.weight"), value(theirs + "mlp.up_proj.weight")
            full[ours + "mlp.linear_fc1.layer_norm_weight"] = norm
            full[ours + "mlp.linear_fc1.weight"] = torch.cat([gate, up])
            full[ours + "mlp.linear_fc2.weight"] = value(theirs + "mlp.down_proj.weight")
        else:
            full[ours + "pre_mlp_layernorm.weight"] = norm
            full[ours + "mlp.router.weight"] = value(theirs + "mlp.gate.weight")
            full[ours + "mlp.experts.experts.linear_fc1.weight"] = value(theirs + "mlp.experts.gate_up_proj")
            full[ours + "mlp.experts.experts.linear_fc2.weight"] = value(theirs + "mlp.experts.down_proj")
    return full
