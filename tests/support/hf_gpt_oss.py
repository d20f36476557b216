"""What ``hf_reference`` says of gpt-oss, whose checkpoints stack experts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import GptOssConfig

from mcore_rl.config.model import Activation, ModelConfig
from tests.support.full_weights import Weights


def gpt_oss_config(model: ModelConfig, shared: dict[str, object]) -> GptOssConfig:
    """The configuration of ``model``.  shared: what all families have."""
    moe = model.moe
    assert moe is not None and moe.ffn_hidden_size == model.ffn_hidden_size and moe.norm_topk_prob
    assert model.linear_bias and model.qkv_bias and model.activation is Activation.quick_gelu
    assert model.glu_linear_offset == 1.0 and model.sliding_layers == list(range(0, model.num_layers, 2))
    return GptOssConfig(
        **shared,
        num_local_experts=moe.num_experts,
        num_experts_per_tok=moe.top_k,
        sliding_window=model.sliding_window,
        swiglu_limit=model.activation_clamp,
    )


def gpt_oss_experts(value: Callable[[str], Tensor], ours: str, theirs: str) -> Weights:
    """Router and experts.  Matrices are [inputs, outputs], and gate and up take turns (``_apply_gate``)."""

    def gate_then_up(tensor: Tensor) -> Tensor:
        return torch.cat([tensor[..., 0::2], tensor[..., 1::2]], dim=-1)

    experts, stored = theirs + "experts.", ours + "experts.experts."
    return {
        ours + "router.weight": value(theirs + "router.weight"),
        ours + "router.bias": value(theirs + "router.bias"),
        stored + "linear_fc1.weight": gate_then_up(value(experts + "gate_up_proj")).transpose(1, 2).contiguous(),
        stored + "linear_fc1.bias": gate_then_up(value(experts + "gate_up_proj_bias")),
        stored + "linear_fc2.weight": value(experts + "down_proj").transpose(1, 2).contiguous(),
        stored + "linear_fc2.bias": value(experts + "down_proj_bias"),
    }
