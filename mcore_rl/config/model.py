"""What a decoder-only transformer is, independent of how it is parallelised, trained or named on disk.

Names are Megatron-core's.  ``families/`` derives a ``ModelConfig`` from a Hugging Face ``config.json``.
"""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.errors import Violation


@dataclass(kw_only=True)
class MoeConfig:
    """The mixture-of-experts part of every layer.

    num_experts: experts per layer, E.  top_k: experts per token, K.  ffn_hidden_size: inner width of one expert.
    norm_topk_prob: renormalise the K chosen probabilities to sum to 1 (Mixtral, Qwen3-MoE) or keep them as the softmax
    over all E gave them (Qwen2-MoE).
    """

    num_experts: int
    top_k: int
    ffn_hidden_size: int
    norm_topk_prob: bool = True


@dataclass(kw_only=True)
class ModelConfig:
    """A pre-norm decoder with RMSNorm, RoPE, grouped-query attention and SwiGLU.

    num_query_groups: key/value heads.  head_dim: width of one head (``num_attention_heads * head_dim`` need not equal
    ``hidden_size``).  ffn_hidden_size: inner width of the dense MLP; unused by layers with experts.
    tie_output: the output projection is the embedding matrix.  qkv_bias: biases on q, k and v (Qwen2).
    qk_norm: RMSNorm over each query and key head (Qwen3).
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rotary_base: float = 10000.0
    norm_epsilon: float = 1e-5
    tie_output: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    moe: MoeConfig | None = None


def model_violations(model: ModelConfig) -> list[Violation]:
    """Everything about ``model`` that no layout could make run."""
    found = []
    positive = ["num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "head_dim"]
    positive += ["vocab_size", "max_position_embeddings"]
    for name in positive:
        if getattr(model, name) < 1:
            found.append(Violation(f"model.{name}", getattr(model, name), "must be positive", "Write 1 or more"))
    if model.num_query_groups >= 1 and model.num_attention_heads % model.num_query_groups:
        divisors = [n for n in range(1, model.num_attention_heads + 1) if model.num_attention_heads % n == 0]
        found.append(
            Violation(
                "model.num_query_groups",
                model.num_query_groups,
                f"does not divide model.num_attention_heads={model.num_attention_heads}",
                f"Write one of {divisors}",
            )
        )
    if model.head_dim % 2:
        found.append(Violation("model.head_dim", model.head_dim, "RoPE rotates pairs", "Write an even number"))
    if model.moe is not None and not 1 <= model.moe.top_k <= model.moe.num_experts:
        found.append(
            Violation(
                "model.moe.top_k",
                model.moe.top_k,
                f"a token needs between 1 and model.moe.num_experts={model.moe.num_experts} experts",
                f"Write 1 to {model.moe.num_experts}",
            )
        )
    return found
