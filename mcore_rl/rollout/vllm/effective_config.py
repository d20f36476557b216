"""The configuration that vLLM's modules compute with, read back inside a worker (``proofs.effective_config``).

vLLM 0.32: the attention's own arguments (layers/attention), the router's (layers/fused_moe/router), and the table of
cosines and sines that every rotation looks up (layers/rotary_embedding).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.rotary_embedding.phi3_long_rope_scaled_rope import Phi3LongRoPEScaledRotaryEmbedding

from mcore_rl.proofs.effective_config import (
    FINAL_NORM,
    MODEL,
    EffectiveConfig,
    Value,
    frequencies_of,
    gate_fields,
    layer_place,
    linear_fields,
    neighbours_rotate,
    norm_fields,
    readable,
    rotary_fields,
    routing_fields,
)

SWIGLUOAI = MoEActivation.SWIGLUOAI.value


def effective_config(model: Any) -> EffectiveConfig:
    """The configuration of vLLM's causal language model ``model``, or of that in a model with a tower; all layers."""
    model = model._modules.get("language_model", model)
    decoder = model.model
    hidden_size = _embedding(decoder).embedding_dim
    places: EffectiveConfig = {
        MODEL: readable(_ends, model),
        FINAL_NORM: norm_fields([("", decoder.norm)], hidden_size),
    }
    rotations: dict[nn.Module, tuple[list[float], float]] = {}  # most layers share one
    for number, layer in enumerate(decoder.layers):
        modules = list(layer.modules())
        fields = norm_fields(layer.named_modules(), hidden_size) | readable(_mlp_fields, modules)
        for name, module in layer.named_modules():
            if isinstance(module, Attention | MLAAttention):
                attention = layer._modules[name.partition(".")[0]]
                if "rotary_emb" in attention._modules:
                    fields |= readable(_attention_fields, attention, module, rotations)
                else:
                    fields |= readable(_fields_of_transformers, attention, module, decoder)
            if isinstance(module, MoERunner):
                fields |= readable(_routing_fields, module)
            if isinstance(module, QwenGatedDeltaNetAttention):
                fields |= linear_fields(module.num_k_heads, module.num_v_heads)
        places[layer_place(number)] = fields
    return places


def _ends(model: Any) -> dict[str, Value]:
    decoder = model.model
    head = model._modules.get("lm_head")
    scale = decoder._buffers.get("normalizer")  # gemma2.py
    cap = model.logits_processor.soft_cap
    return {
        "embedding_scale": 1.0 if scale is None else float(scale),
        "output_soft_cap": float(cap) if cap else None,
        "tie_output": head is None or head.weight is _embedding(decoder).weight,
    }


def _embedding(decoder: Any) -> Any:
    return decoder._modules.get("embed_tokens", decoder._modules.get("embedding"))  # gpt_oss.py calls it the latter


def _mlp_fields(modules: Sequence[nn.Module]) -> dict[str, Value]:
    activations = {name for module in modules if (name := _activation(module)) is not None}
    named: dict[str, Value] = {"activation": " and ".join(sorted(activations))} if activations else {}
    if activations == {SWIGLUOAI}:  # its numbers are written into the kernels (csrc, swigluoai_and_mul)
        named |= gate_fields(lambda x: x * torch.sigmoid(1.702 * x), clamp=7.0, offset=1.0)
    return named | {"zero_centered_norm": any(isinstance(module, GemmaRMSNorm) for module in modules)}


def _activation(module: nn.Module) -> str | None:
    if isinstance(module, MoERunner):
        name: str = module.moe_config.activation.value  # MoEActivation's names are ours
        return name
    if isinstance(module, SiluAndMul):
        return "silu"
    if isinstance(module, GeluAndMul):
        return "gelu_tanh" if module.approximate == "tanh" else "gelu"
    return None


def _attention_fields(attention: Any, core: Any, rotations: dict[Any, Any]) -> dict[str, Value]:
    own = vars(attention)
    cap = vars(core.impl).get("logits_soft_cap")
    rotary = attention._modules["rotary_emb"]
    if rotary not in rotations:
        rotations[rotary] = frequencies_of(*_cosines_and_sines(rotary).chunk(2, dim=-1))
    frequencies, factor = rotations[rotary]
    head_dim = own.get("qk_head_dim", own.get("head_dim"))
    fields = rotary_fields(frequencies, factor, core.impl.scale, head_dim)
    fields |= {
        "rotary_interleaved": not vars(rotary).get("is_neox_style", True),  # longrope knows no other style
        "num_attention_heads": own.get("total_num_heads", own.get("num_heads", own.get("num_attention_heads"))),
        "attention_soft_cap": float(cap) if cap else None,
        "sliding_window": core.sliding_window,
    }
    for name in ("total_num_kv_heads", "num_key_value_heads"):
        if name in own:
            fields["num_query_groups"] = own[name]
    return fields


def _fields_of_transformers(attention: Any, core: Any, decoder: Any) -> dict[str, Value]:
    """Read the fields of attention where vLLM has no class of its own for the model: modules are transformers'."""
    own = vars(attention)
    rotary = decoder.rotary_emb
    rotates = own.get("use_rope", True)  # smollm3
    frequencies = rotary.inv_freq.double().cpu().tolist() if rotates else []
    fields = rotary_fields(frequencies, rotary.attention_scaling, core.impl.scale, own["head_dim"])
    return fields | {
        "rotary_interleaved": neighbours_rotate(attention),
        "num_attention_heads": own["config"].num_attention_heads,
        "num_query_groups": own["config"].num_key_value_heads,
        "attention_soft_cap": vars(core.impl).get("logits_soft_cap") or None,
        "sliding_window": core.sliding_window,
    }


def _cosines_and_sines(rotary: Any) -> Tensor:
    """The rows by position that ``rotary`` looks up; longrope has two sets of them, and uses one (forward)."""
    rows: Tensor
    if isinstance(rotary, Phi3LongRoPEScaledRotaryEmbedding):
        rows = rotary.long_short_cos_sin_cache
        trained = rotary.original_max_position_embeddings
        return rows[trained:] if rotary.use_long_rope else rows[:trained]
    rows = rotary.cos_sin_cache
    return rows


def _routing_fields(runner: Any) -> dict[str, Value]:
    """Routers keep what their scheme reads: the CPU's knows all schemes, the others one each."""
    own = vars(runner.router)
    grouped = own.get("use_grouped_topk", own.get("num_expert_group") is not None)
    groups, kept = (own.get("num_expert_group"), own.get("topk_group")) if grouped else (1, 1)
    return routing_fields(
        num_experts=runner.moe_config.num_logical_experts,
        top_k=own["top_k"],
        score=own["scoring_func"],
        norm_topk_prob=own["renormalize"],
        num_groups=groups or 1,
        top_k_groups=kept or 1,
        scale=own.get("routed_scaling_factor", 1.0) * runner.routed_scaling_factor,
    )
