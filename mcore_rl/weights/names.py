"""One name for each tensor, whatever Megatron's modules call it.

Canonical names are those of Megatron-core's local layers.  Transformer Engine's layers fuse norms and experts and name
them otherwise, and adapters wrap a linear layer; this is the one map between them.  The tables speak canonical names
only.
"""

from __future__ import annotations

import re

# Pattern in a state dict's key -> canonical spelling; megatron-core 0.16.1, models/gpt/gpt_layer_specs.py and
# extensions/transformer_engine.py.
_DIALECTS = tuple(
    (re.compile(pattern), spelling)
    for pattern, spelling in (
        (r"\.(?:to_wrap|base_layer)\.", "."),  # the frozen linear layer inside an adapter: Megatron-Bridge, PEFT
        (r"\.self_attention\.(?:linear_qkv|in_proj)\.layer_norm_(weight|bias)$", r".input_layernorm.\1"),
        (r"\.mlp\.linear_fc1\.layer_norm_(weight|bias)$", r".pre_mlp_layernorm.\1"),
        (r"\.linear_(q|kv)_up_proj\.layer_norm_weight$", r".\1_layernorm.weight"),
        (r"\.mlp\.experts\.linear_fc([12])\.weight(\d+)$", r".mlp.experts.local_experts.\2.linear_fc\1.weight"),
    )
)
# Keys that hold nothing of a Hugging Face checkpoint: Transformer Engine's own state, and adapters.
_NO_WEIGHT = re.compile(r"_extra_state$|\.adapter\.|\.lora_[AB]\.")


def canonical(key: str) -> str | None:
    """The canonical name of a state dict's ``key``; None if it holds no weight of the base model."""
    if _NO_WEIGHT.search(key):
        return None
    for pattern, spelling in _DIALECTS:
        key = pattern.sub(spelling, key)
    return key
