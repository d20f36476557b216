"""Tiny models of every kind that the engine builds, small enough for the whole invariance gate, odd enough to catch
mistakes.

The vocabulary does not divide by anything (padding), ``head_dim * heads`` is not the hidden size, and there are fewer
key/value heads than heads.
"""

from __future__ import annotations

from mcore_rl.config.model import ModelConfig, MoeConfig


def dense(**changes: object) -> ModelConfig:
    """Llama-style: grouped-query attention, SwiGLU, untied output."""
    settings = dict(
        num_layers=4,
        hidden_size=48,
        ffn_hidden_size=96,
        num_attention_heads=4,
        num_query_groups=2,
        head_dim=16,
        vocab_size=101,
        max_position_embeddings=128,
        rotary_base=10000.0,
    )
    return ModelConfig(**(settings | changes))  # type: ignore[arg-type]


def moe(*, norm_topk_prob: bool = True, **changes: object) -> ModelConfig:
    """Mixtral-style: 4 experts, 2 a token."""
    experts = MoeConfig(num_experts=4, top_k=2, ffn_hidden_size=64, norm_topk_prob=norm_topk_prob)
    return dense(**({"moe": experts} | changes))
