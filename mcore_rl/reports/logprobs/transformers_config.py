"""The configuration that transformers' modules compute with, read back from them (``proofs.effective_config``).

transformers 5.19.  Some of it is written into its code: what no module keeps is found by calling the module.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mcore_rl.proofs.effective_config import (
    FINAL_NORM,
    MODEL,
    EffectiveConfig,
    Value,
    activation_name,
    layer_place,
    norm_fields,
    rotary_fields,
    routing_fields,
)

SLIDING = "sliding_attention"


@torch.no_grad()
def effective_config(model: Any) -> EffectiveConfig:
    """The configuration of transformers' causal language model ``model``, all layers."""
    decoder, config = model.model, model.config.to_dict()
    hidden_size = decoder.embed_tokens.embedding_dim
    scale = decoder.embed_tokens._buffers.get("embed_scale")
    ends: dict[str, Value] = {
        "embedding_scale": 1.0 if scale is None else float(scale),
        "output_soft_cap": config.get("final_logit_softcapping"),
        "tie_output": model.lm_head.weight is decoder.embed_tokens.weight,
    }
    found: EffectiveConfig = {MODEL: ends, FINAL_NORM: norm_fields([decoder.norm], hidden_size)}
    for number, layer in enumerate(decoder.layers):
        kind = (config.get("layer_types") or [SLIDING] * (number + 1))[number]
        found[layer_place(number)] = dict(_layer_fields(layer, decoder.rotary_emb, config, kind, hidden_size))
    return found


def _layer_fields(
    layer: Any, rotary: Any, config: dict[str, Any], kind: str, hidden_size: int
) -> Iterator[tuple[str, Value]]:
    modules = list(layer.modules())
    yield from norm_fields(modules, hidden_size).items()
    yield "zero_centered_norm", _zero_centered(next(each for each in modules if "Norm" in type(each).__name__))
    functions = [functions["act_fn"] for each in modules if "act_fn" in (functions := vars(each) | each._modules)]
    yield "activation", " and ".join(sorted({activation_name(function) for function in functions}))
    attention = layer.self_attn
    own = vars(attention)
    buffers = rotary._buffers
    prefix = "" if "inv_freq" in buffers else f"{kind}_"  # some families rotate by the kind of the layer
    factor = vars(rotary)[f"{prefix}attention_scaling"]
    head_dim = own.get("qk_head_dim", own.get("head_dim"))
    yield from rotary_fields(_floats(buffers[f"{prefix}inv_freq"]), factor, own["scaling"], head_dim).items()
    yield "num_attention_heads", config["num_attention_heads"]
    if "kv_lora_rank" not in own:
        yield "num_query_groups", config["num_attention_heads"] // own["num_key_value_groups"]
    yield "attention_soft_cap", own.get("attn_logit_softcapping")
    yield "rotary_interleaved", config.get("rope_interleave", _interleaved(attention))
    # The mask has the window, and the mask is made from the configuration (masking_utils.py).
    yield "sliding_window", config.get("sliding_window") if kind == SLIDING else None
    if "experts" in layer.mlp._modules:
        yield from _routing_fields(layer.mlp).items()


def _interleaved(attention: Any) -> bool:
    """Whether rotated pairs are neighbours, by the ``rotate_half`` of the file of ``attention``."""
    rotate_half = vars(sys.modules[type(attention).__module__])["rotate_half"]
    return bool(rotate_half(torch.tensor([0.0, 1.0, 0.0, 0.0]))[0] != 0)


def _zero_centered(norm: Any) -> bool:
    """Whether ``norm`` multiplies by one plus its weight: what it makes of ones, whose root mean square is 1."""
    ones = torch.ones(1, len(norm.weight), dtype=norm.weight.dtype, device=norm.weight.device)
    made, weight = norm(ones)[0].float(), norm.weight.float()
    return bool((made - (1 + weight)).abs().mean() < (made - weight).abs().mean())


def _routing_fields(block: Any) -> dict[str, Value]:
    """The router's fields; whether it normalises, and which scores, by what it makes of a random token."""
    router, settings = block.gate, vars(block) | vars(block.gate)
    scale = settings.get("routed_scaling_factor", 1.0)
    device, dtype = router.weight.device, router.weight.dtype
    token = torch.randn(1, router.weight.shape[1], generator=torch.Generator().manual_seed(0)).to(device, dtype)
    logits, weights, chosen = (each[0] for each in router(token))
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
