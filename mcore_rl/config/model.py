"""What a decoder-only transformer is, independent of how it is parallelised, trained or named on disk.

Names are Megatron-core's.  ``families/`` derives a ``ModelConfig`` from a Hugging Face ``config.json``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from mcore_rl.errors import Violation


class RopeType(Enum):
    """How the rotary frequencies of a longer context are made from those of the pre-training; names as in transformers.

    default: ``rotary_base ** (-2i / d)``.  linear: all frequencies divided by ``factor`` (position interpolation).
    llama3: low frequencies divided by ``factor``, high ones kept, a ramp between (Llama 3.1).  yarn: a ramp over
    dimensions and a factor on cosine and sine (arXiv:2309.00071).
    """

    default = "default"
    linear = "linear"
    llama3 = "llama3"
    yarn = "yarn"


class Activation(Enum):
    """The gate's activation in the gated MLP: silu (SwiGLU), or gelu in its tanh approximation (GeGLU; Gemma)."""

    silu = "silu"
    gelu_tanh = "gelu_tanh"


class RouterScore(Enum):
    """What turns a router's logits into scores: softmax over the experts, or a sigmoid of each (DeepSeek-V3)."""

    softmax = "softmax"
    sigmoid = "sigmoid"


@dataclass(kw_only=True)
class RopeConfig:
    """Rotary position embedding; fields that its ``type`` does not name are unused.

    factor: of the extension (linear, llama3, yarn).  original_max_position_embeddings: tokens of the pre-training
    (llama3, yarn).  low_freq_factor, high_freq_factor: bounds of llama3's ramp.  beta_fast, beta_slow: bounds of yarn's
    ramp, in rotations.  truncate: round those bounds to whole dimensions (yarn).  attention_factor: multiplies cosine
    and sine (yarn), already computed from whatever a checkpoint says (mscale and kin).
    """

    type: RopeType = RopeType.default
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


@dataclass(kw_only=True)
class MlaConfig:
    """Multi-head latent attention (arXiv:2405.04434): keys and values are projections of one small latent per token.

    q_lora_rank: rank of the query projection; None projects queries at once.  kv_lora_rank: width of the latent.
    qk_nope_head_dim, qk_rope_head_dim: parts of a query or key head without and with rotation; the rotated part of the
    key is shared by all heads.  v_head_dim: width of a value head.  interleaved: rotated pairs are neighbours in the
    weights (2i, 2i + 1), as DeepSeek publishes them.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    interleaved: bool = True


@dataclass(kw_only=True)
class MoeConfig:
    """The mixture-of-experts part of the layers that have one.

    num_experts: experts per layer, E.  top_k: experts per token, K.  ffn_hidden_size: inner width of one expert.
    norm_topk_prob: renormalise the K chosen probabilities to sum to 1 (Mixtral, Qwen3-MoE) or keep them as the softmax
    over all E gave them (Qwen2-MoE).
    dense_layers: layers (from 0) that have the dense MLP instead (``ffn_hidden_size`` of the model).
    shared_ffn_hidden_size: inner width of the expert that every token passes (the sum of the widths where a model
    counts several); 0 is none.  shared_gate: a learned sigmoid gate on its output (Qwen2-MoE).
    score: see ``RouterScore``.  expert_bias: a per-expert bias that takes part in the choice of experts and not in
    their weight (arXiv:2408.15664).  num_groups, top_k_groups: experts come in groups, and a token may only choose from
    its best ``top_k_groups`` (by the sum of the two best experts).  routed_scaling_factor: on the weights of the
    chosen experts, after the renormalisation.
    """

    num_experts: int
    top_k: int
    ffn_hidden_size: int
    norm_topk_prob: bool = True
    dense_layers: list[int] = field(default_factory=list)
    shared_ffn_hidden_size: int = 0
    shared_gate: bool = False
    score: RouterScore = RouterScore.softmax
    expert_bias: bool = False
    num_groups: int = 1
    top_k_groups: int = 1
    routed_scaling_factor: float = 1.0


@dataclass(kw_only=True)
class ModelConfig:
    """A decoder with RMSNorm, RoPE and a gated MLP.

    num_query_groups: key/value heads.  head_dim: width of one query or key head (``num_attention_heads * head_dim``
    need not equal ``hidden_size``).  ffn_hidden_size: inner width of the dense MLP; unused by layers with experts.
    tie_output: the output projection is the embedding matrix.  qkv_bias: biases on q, k and v (Qwen2).
    qk_norm: RMSNorm over each query and key head (Qwen3).  mla: latent attention instead of grouped queries; head_dim
    is then the sum of its two parts, and num_query_groups equals num_attention_heads.
    sliding_window: a token in one of the ``sliding_layers`` (from 0) sees itself and the ``sliding_window - 1`` tokens
    before it.  softmax_scale: on query-key products; None is ``head_dim ** -0.5`` (of latent attention with yarn, times
    what ``families`` found in the checkpoint's mscale).  attention_soft_cap, output_soft_cap:
    ``cap * tanh(x / cap)`` on the attention's scores and on the logits (Gemma 2).  zero_centered_norm: norms multiply
    by ``1 + weight``.  sandwich_norm: a norm behind attention and MLP too, before the residual sum.  embedding_scale:
    multiplies the embeddings.
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
    rope: RopeConfig = field(default_factory=RopeConfig)
    norm_epsilon: float = 1e-5
    activation: Activation = Activation.silu
    tie_output: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    mla: MlaConfig | None = None
    sliding_window: int | None = None
    sliding_layers: list[int] = field(default_factory=list)
    softmax_scale: float | None = None
    attention_soft_cap: float | None = None
    output_soft_cap: float | None = None
    zero_centered_norm: bool = False
    sandwich_norm: bool = False
    embedding_scale: float = 1.0
    moe: MoeConfig | None = None

    def has_experts(self, layer: int) -> bool:
        """Whether ``layer`` (from 0) has a mixture of experts instead of the dense MLP."""
        return self.moe is not None and layer not in self.moe.dense_layers


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
