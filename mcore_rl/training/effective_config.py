"""The configuration that Megatron's modules compute with, read back from them (``proofs.effective_config``)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.utils import is_layer_window_attention

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.role import Head
from mcore_rl.proofs.effective_config import (
    FINAL_NORM,
    MODEL,
    EffectiveConfig,
    Value,
    activation_name,
    gate_fields,
    layer_place,
    linear_fields,
    norm_fields,
    readable,
    rotary_fields,
    routing_fields,
)
from mcore_rl.training.gated_delta_net import PackedGatedDeltaNet
from mcore_rl.training.latent_attention import LatentAttention
from mcore_rl.training.model import ScaledEmbeddings
from mcore_rl.training.rope import ScaledKeyPart
from mcore_rl.training.rotation import TwoBaseAttention


def effective_config(chunks: Sequence[GPTModel], model: ModelConfig, head: Head = Head.lm) -> EffectiveConfig:
    """The configuration of the layers that this rank holds, in ``chunks``.

    model: of the engine, which applies the soft cap of the logits itself.  head: a value head has no cap, and is never
    tied.
    """
    places: EffectiveConfig = {}
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            places[layer_place(layer.layer_number - 1)] = _layer_fields(layer, chunk)
        ends = places.setdefault(MODEL, {})
        if chunk.pre_process:
            ends["embedding_scale"] = _embedding_scale(chunk)
        if chunk.post_process:
            places[FINAL_NORM] = norm_fields([("", chunk.decoder.final_layernorm)], chunk.config.hidden_size)
            if head is Head.lm:
                ends |= {
                    "output_soft_cap": model.output_soft_cap,
                    "tie_output": chunk.share_embeddings_and_output_weights,
                }
    return places


def _embedding_scale(chunk: GPTModel) -> float:
    hooks = [hook for hook in chunk.embedding._forward_hooks.values() if isinstance(hook, ScaledEmbeddings)]
    return hooks[0].factor if hooks else 1.0


def _layer_fields(layer: Any, chunk: GPTModel) -> dict[str, Value]:
    config = layer.config
    fields = norm_fields(layer.named_modules(), config.hidden_size)
    fields |= {
        "zero_centered_norm": config.layernorm_zero_centered_gamma,
        "activation": activation_name(config.activation_func),
    }
    if config.activation_func_clamp_value is not None:
        clamp = config.activation_func_clamp_value
        offset = config.glu_linear_offset
        fields |= gate_fields(config.activation_func, clamp, offset)
    if isinstance(layer.self_attention, PackedGatedDeltaNet):
        fields |= linear_fields(layer.self_attention.linear.num_key_heads, layer.self_attention.num_value_heads)
    else:
        fields |= readable(_attention_fields, layer.self_attention, chunk)
    if isinstance(layer.mlp, MoELayer):
        fields |= readable(_routing_fields, layer.mlp.router)
    return fields


def _attention_fields(attention: Any, chunk: GPTModel) -> dict[str, Value]:
    config = attention.config
    core = attention.core_attention
    own = vars(core)  # Transformer Engine's attention keeps no scale, window or cap of its own
    if isinstance(attention, LatentAttention):
        frequencies = attention.inverse_frequencies
        factor = attention.cos_sin_factor
        mla = attention.mla
        head_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        interleaved = mla.interleaved
    else:
        frequencies = chunk.rotary_pos_emb.inv_freq
        factor = _factor_of_a_part(attention)
        if isinstance(attention, TwoBaseAttention):
            frequencies = frequencies.chunk(2)[attention.frequency_set]
        if config.no_rope_freq and config.no_rope_freq[attention.layer_number - 1]:
            frequencies = frequencies[:0]
        head_dim = config.kv_channels
        interleaved = config.rotary_interleaved
    fields = rotary_fields(_floats(frequencies), factor, own.get("softmax_scale", config.softmax_scale), head_dim)
    fields |= {
        "rotary_interleaved": interleaved,
        "num_attention_heads": config.num_attention_heads,
        "attention_soft_cap": own.get("soft_cap"),
        "sliding_window": own["window"] if "window" in own else _window(config, attention.layer_number),
    }
    if not isinstance(attention, LatentAttention):
        fields["num_query_groups"] = config.num_query_groups
    return fields


def _factor_of_a_part(attention: Any) -> float:
    """The factor on cosine and sine of partly rotated heads, whose square multiplies that part of each key."""
    scaled = attention.k_layernorm
    return math.sqrt(scaled.scale) if isinstance(scaled, ScaledKeyPart) else 1.0


def _window(config: Any, layer_number: int) -> int | None:
    windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
    return config.window_size[0] + 1 if windowed else None


def _routing_fields(router: Any) -> dict[str, Value]:
    config = router.config
    limited = config.moe_router_group_topk is not None
    return routing_fields(
        num_experts=config.num_moe_experts,
        top_k=router.topk,
        score=router.score_function,
        norm_topk_prob=not config.moe_router_pre_softmax,
        num_groups=config.moe_router_num_groups if limited else 1,
        top_k_groups=config.moe_router_group_topk if limited else 1,
        scale=config.moe_router_topk_scaling_factor or 1.0,
    )


def _floats(values: torch.Tensor) -> list[float]:
    floats: list[float] = values.detach().double().cpu().tolist()
    return floats
