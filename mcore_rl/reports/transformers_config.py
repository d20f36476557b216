"""The configuration that transformers' modules compute with, read back from them (``proofs.effective_config``).

transformers 5.19.  Some of it is written into its code: what no module keeps is found by calling the module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mcore_rl.proofs.effective_config import (
    FINAL_NORM,
    MODEL,
    EffectiveConfig,
    Value,
    activation_name,
    gate_fields,
    layer_place,
    linear_fields,
    neighbours_rotate,
    norm_fields,
    readable,
    rotary_fields,
    routing_fields,
)

SLIDING = "sliding_attention"
LINEAR = "linear_attention"
ACTIVATIONS = ("act_fn", "activation_fn")  # names of a module's activation
ROUTERS = {"gate", "router"}  # names of a router beside the experts


@torch.no_grad()
def effective_config(model: Any) -> EffectiveConfig:
    """The configuration of transformers' causal language model ``model``, or of one within it, all layers."""
    decoder = model.get_decoder()
    config = model.config.get_text_config().to_dict()
    hidden_size = decoder.embed_tokens.embedding_dim
    scale = decoder.embed_tokens._buffers.get("embed_scale")
    ends: dict[str, Value] = {
        "embedding_scale": 1.0 if scale is None else float(scale),
        "output_soft_cap": config.get("final_logit_softcapping"),
        "tie_output": model.lm_head.weight is decoder.embed_tokens.weight,
    }
    places: EffectiveConfig = {MODEL: ends, FINAL_NORM: norm_fields([("", decoder.norm)], hidden_size)}
    for number, layer in enumerate(decoder.layers):
        kind = (config.get("layer_types") or [SLIDING] * (number + 1))[number]
        modules = list(layer.modules())
        fields = norm_fields(layer.named_modules(), hidden_size) | readable(_mlp_fields, modules)
        if kind == LINEAR:
            fields |= linear_fields(config["linear_num_key_heads"], config["linear_num_value_heads"])
        else:
            fields |= readable(_attention_fields, layer.self_attn, decoder.rotary_emb, config, kind)
        for module in modules:
            if "experts" in module._modules and module._modules.keys() & ROUTERS:
                fields |= readable(_routing_fields, module)
        places[layer_place(number)] = fields
    return places


def _mlp_fields(modules: Sequence[Any]) -> dict[str, Value]:
    functions = [
        value for each in modules for name, value in (vars(each) | each._modules).items() if name in ACTIVATIONS
    ]
    named: dict[str, Value] = {}
    if functions:
        named["activation"] = " and ".join(sorted({activation_name(function) for function in functions}))
    for module in modules:
        if {"alpha", "limit"} <= vars(module).keys():  # gpt_oss
            named |= _clamped_gate(module)
    return named | {
        "zero_centered_norm": any(_zero_centered(each) for each in modules if "Norm" in type(each).__name__)
    }


def _clamped_gate(experts: Any) -> dict[str, Value]:
    """What ``_apply_gate`` of GptOssExperts computes; the shift is what is left of a gate of 1 beside 0."""
    alpha = experts.alpha
    gate = torch.tensor([1.0, 0.0])
    beside = experts._apply_gate(gate)
    return gate_fields(
        lambda x: x * torch.sigmoid(alpha * x), experts.limit, float(beside / torch.sigmoid(alpha * gate[:1]))
    )


def _attention_fields(attention: Any, rotary: Any, config: dict[str, Any], kind: str) -> dict[str, Value]:
    own = vars(attention)
    buffers = rotary._buffers
    prefix = "" if "inv_freq" in buffers else f"{kind}_"  # some families rotate by the kind of the layer
    frequencies = _floats(buffers[f"{prefix}inv_freq"])
    factor = vars(rotary)[f"{prefix}attention_scaling"]
    if not own.get("use_rope", True):  # a layer without positions (smollm3)
        frequencies = []
    fields = rotary_fields(frequencies, factor, own["scaling"], own.get("qk_head_dim", own.get("head_dim")))
    fields |= {
        "rotary_interleaved": config.get("rope_interleave", neighbours_rotate(attention)),
        "num_attention_heads": config["num_attention_heads"],
        "attention_soft_cap": own.get("attn_logit_softcapping"),
        # The mask has the window, and is made from the configuration (masking_utils.py).
        "sliding_window": config.get("sliding_window") if kind == SLIDING else None,
    }
    if "kv_lora_rank" not in own:
        fields["num_query_groups"] = config["num_attention_heads"] // own["num_key_value_groups"]
    return fields


def _zero_centered(norm: Any) -> bool:
    """Whether ``norm`` multiplies by one plus its weight: what it makes of ones, whose root mean square is 1.

    Not a norm with a gate, which is called with it; nowhere is it zero-centred.
    """
    if "Gated" in type(norm).__name__:
        return False
    ones = torch.ones(1, len(norm.weight), dtype=norm.weight.dtype, device=norm.weight.device)
    made = norm(ones)[0].float()
    weight = norm.weight.float()
    return bool((made - (1 + weight)).abs().mean() < (made - weight).abs().mean())


def _routing_fields(block: Any) -> dict[str, Value]:
    """The router's fields; whether it normalises, and which scores, by what it makes of a random token."""
    (router,) = (block._modules[name] for name in ROUTERS & block._modules.keys())
    settings = vars(block) | vars(router)
    scale = settings.get("routed_scaling_factor", 1.0)
    device = router.weight.device
    dtype = router.weight.dtype
    token = torch.randn(1, router.weight.shape[1], generator=torch.Generator().manual_seed(0)).to(device, dtype)
    bias = block._buffers.get("e_score_correction_bias")  # which MiniMax-M2's block gives to its router
    answer = router(token) if bias is None else router(token, bias)
    logits, weights, chosen = (each[0] for each in answer)
    score, norm_topk_prob = _scores_and_norm(logits.float(), weights.float() / scale, chosen)
    return routing_fields(
        num_experts=len(logits),
        top_k=len(chosen),
        score=score,
        norm_topk_prob=norm_topk_prob,
        num_groups=settings.get("num_group", settings.get("n_group", 1)),
        top_k_groups=settings.get("topk_group", 1),
        scale=scale,
    )


def _scores_and_norm(logits_E: Tensor, weights_K: Tensor, chosen_K: Tensor) -> tuple[str, bool]:
    errors = {}
    for score, scores_E in (("softmax", logits_E.softmax(-1)), ("sigmoid", logits_E.sigmoid())):
        for norm in (True, False):
            expected_K = scores_E[chosen_K] / (scores_E[chosen_K].sum() if norm else 1.0)
            errors[score, norm] = float((expected_K - weights_K).abs().max())
    return min(errors, key=errors.__getitem__)


def _floats(values: Tensor) -> list[float]:
    floats: list[float] = values.detach().double().cpu().tolist()
    return floats
