"""The architecture of a decoder-only transformer, independent of how it is parallelised, trained or named on disk.

Names are Megatron-core's.  ``families/`` derives a ``ModelConfig`` from a Hugging Face ``config.json``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


class RopeType(Enum):
    """How rotary frequencies are changed for a context longer than in pre-training; names as in transformers.

    default: ``rotary_base ** (-2i / d)``.  linear: all frequencies divided by ``factor`` (position interpolation).
    llama3: low frequencies divided by ``factor``, high ones kept, a ramp between (Llama 3.1).  yarn: a ramp over
    dimensions and a factor on cosine and sine (arXiv:2309.00071).  longrope: each frequency divided by a number of its
    own, and a factor on cosine and sine (arXiv:2402.13753).
    """

    default = "default"
    linear = "linear"
    llama3 = "llama3"
    yarn = "yarn"
    longrope = "longrope"


class Activation(Enum):
    """The gate's activation in the gated MLP.

    silu: SwiGLU.  gelu_tanh: gelu in its tanh approximation (GeGLU; Gemma).  quick_gelu: ``x * sigmoid(1.702 x)``
    (gpt-oss).
    """

    silu = "silu"
    gelu_tanh = "gelu_tanh"
    quick_gelu = "quick_gelu"


class RouterScore(Enum):
    """How a router's logits become scores: softmax over the experts, or a sigmoid of each (DeepSeek-V3)."""

    softmax = "softmax"
    sigmoid = "sigmoid"


@dataclass(kw_only=True)
class RopeConfig:
    """Rotary position embedding.  In parentheses: the types that read a field.

    factor: of the context extension (linear, llama3, yarn).
    original_max_position_embeddings: context length of the pre-training, tokens (llama3, yarn, longrope).
    low_freq_factor, high_freq_factor: bounds of the ramp (llama3).
    beta_fast, beta_slow: bounds of the ramp, in rotations (yarn).
    truncate: round those bounds to whole dimensions (yarn).
    attention_factor: multiplies cosine and sine (yarn, longrope); already computed from a checkpoint's mscale and
    mscale_all_dim.  short_factor: divisors of the frequencies, for contexts of the pre-training's length (longrope).
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
    short_factor: list[float] = field(default_factory=list)


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
class LinearAttentionConfig:
    """The gated delta rule (arXiv:2412.06464) in place of attention: a state per head, whatever the sequence's length.

    layers: those (from 0) that have it; the others attend.  num_key_heads, num_value_heads: heads of queries and keys,
    and of values; neighbouring value heads share a key head.  key_head_dim, value_head_dim: their widths.
    conv_kernel_dim: tokens that the convolution before it sees, a token's own included.
    """

    layers: list[int]
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel_dim: int

    @property
    def key_dim(self) -> int:
        """The width of all keys of a token, and of all queries."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_dim(self) -> int:
        """The width of all values of a token."""
        return self.num_value_heads * self.value_head_dim


@dataclass(kw_only=True)
class MoeConfig:
    """The mixture-of-experts part of the layers that have one.

    num_experts: experts per layer, E.  top_k: experts per token, K.  ffn_hidden_size: inner width of one expert.
    norm_topk_prob: renormalise the K chosen probabilities to sum to 1 (Mixtral, Qwen3-MoE), or keep them as the softmax
    over all E gave them (Qwen2-MoE).
    dense_layers: layers (from 0) that have the dense MLP instead (``ffn_hidden_size`` of the model).
    shared_ffn_hidden_size: inner width of the shared expert, which every token passes; the sum of the widths if a model
    has several; 0 is none.
    shared_gate: a learned sigmoid gate on its output (Qwen2-MoE).
    score: see ``RouterScore``.
    expert_bias: a per-expert bias that affects which experts are chosen, but not their weights (arXiv:2408.15664).
    num_groups, top_k_groups: experts are in groups, and a token chooses only from its best ``top_k_groups``, ranked by
    their best expert, with ``expert_bias`` by the sum of their two best.
    routed_scaling_factor: multiplies the weights of the chosen experts, after the renormalisation.
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

    @property
    def choice_bytes(self) -> int:
        """Bytes of a recorded choice: an expert's number, as uint8 if there are at most 256 experts, else as int16."""
        return 1 if self.num_experts <= 256 else 2


class TowerKind(Enum):
    """Whose modules a vision tower has; the values are transformers' model types.

    qwen2_5_vl: RMSNorm, a gated MLP, attention within windows in most blocks.  qwen3_vl: LayerNorm, learned positions,
    attention over the whole picture, features for several layers of the language model (deepstack).
    """

    qwen2_5_vl = "qwen2_5_vl"
    qwen3_vl = "qwen3_vl"


@dataclass(kw_only=True)
class VisionConfig:
    """The tower that makes features of pictures, one for each of their tokens.

    depth: blocks.  ffn_hidden_size: inner width of a block's MLP.  patch_size: pixels along a side of a patch.
    merge_size: patches along a side of the square that becomes one token.  temporal_patch_size: frames of a patch; a
    still picture has its frame as often.  window_size: pixels along a side of a window of attention; None: there are
    none.  full_blocks: the blocks (from 0) that attend over the whole picture in spite of windows.
    num_positions: learned positions, a square; 0: none.  deepstack: the blocks whose output also becomes features, the
    first of which are added behind layer 0 of the language model, and so on.
    pixel_mean, pixel_std: of red, green and blue between 0 and 1, by which pixels are normalised.
    """

    kind: TowerKind
    depth: int
    hidden_size: int
    num_heads: int
    ffn_hidden_size: int
    patch_size: int
    merge_size: int = 2
    temporal_patch_size: int = 2
    window_size: int | None = None
    full_blocks: list[int] = field(default_factory=list)
    num_positions: int = 0
    deepstack: list[int] = field(default_factory=list)
    pixel_mean: list[float] = field(default_factory=lambda: [0.5, 0.5, 0.5])
    pixel_std: list[float] = field(default_factory=lambda: [0.5, 0.5, 0.5])


@dataclass(kw_only=True)
class MropeConfig:
    """Rotation by positions of three axes: time, height, width (arXiv:2409.12191).

    sections: how many of a head's frequencies are of each axis.  interleaved: the axes take turns, as far as height and
    width go, time has the rest (Qwen3-VL); else they follow one another, the fastest frequencies first (Qwen2-VL).
    """

    sections: list[int]
    interleaved: bool = False


class LayerKind(NamedTuple):
    """What decides which tensors a layer has; see ``ModelConfig.has_experts`` and ``is_linear``."""

    has_experts: bool
    is_linear: bool


@dataclass(kw_only=True)
class ModelConfig:
    """A decoder with RMSNorm, RoPE and a gated MLP.

    num_query_groups: key/value heads.  head_dim: width of one query or key head (``num_attention_heads * head_dim``
    need not equal ``hidden_size``).  ffn_hidden_size: inner width of the dense MLP; unused by layers with experts.
    tie_output: the output projection is the embedding matrix.  qkv_bias: biases on q, k and v (Qwen2).
    qk_norm: RMSNorm over each query and key head (Qwen3); with joint_qk_norm, over all query heads of a token at once
    and over all its key heads (OLMoE).  attention_output_gate: attention's output is multiplied by the sigmoid of a
    gate as wide, which is projected beside the queries (Qwen3-Next).  linear_attention: instead of attention in some
    layers.  mla: latent attention instead of grouped queries; head_dim is then the sum of
    its two parts, and num_query_groups equals num_attention_heads.
    rotary_percent: the share of each query and key head, from its beginning, that RoPE rotates (GLM-4.5, Phi-4-mini).
    rotary_interleaved: rotated pairs are neighbours (2i, 2i + 1), and not (i, i + pairs) (ERNIE-4.5); of latent
    attention its own ``interleaved`` says it.  no_rope_layers: those (from 0) that rotate nothing (SmolLM3).
    local_rotary_base: the rotary base of the sliding layers, whose frequencies ``rope`` does not change (Gemma 3);
    None: all layers rotate alike.
    sliding_window: a token in one of the ``sliding_layers`` (from 0) sees itself and the ``sliding_window - 1`` tokens
    before it.  attention_sinks: each query head has a learned score that takes part in its softmax and has no value, so
    that a token may attend to nothing (gpt-oss).  linear_bias: biases on every linear layer: queries, keys, values,
    output projection, router and experts (gpt-oss).  activation_clamp: before the activation, the gate is at most so
    much, and the other half of the MLP within plus or minus it; glu_linear_offset: is added to that half, then.
    softmax_scale: on query-key products; None is ``head_dim ** -0.5`` (for latent attention with yarn,
    ``families`` multiplies it by what the checkpoint's mscale gives).  attention_soft_cap, output_soft_cap:
    ``cap * tanh(x / cap)`` on the attention's scores and on the logits (Gemma 2).  zero_centered_norm: norms multiply
    by ``1 + weight``.  sandwich_norm: also a norm after attention and MLP, before the residual sum.  embedding_scale:
    multiplies the embeddings.  vision: the tower of a model that sees pictures; None: it reads text alone.  mrope: how
    its tokens' positions of three axes rotate; None: a token has one position.
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
    rotary_percent: float = 1.0
    rotary_interleaved: bool = False
    no_rope_layers: list[int] = field(default_factory=list)
    rope: RopeConfig = field(default_factory=RopeConfig)
    norm_epsilon: float = 1e-5
    activation: Activation = Activation.silu
    activation_clamp: float | None = None
    glu_linear_offset: float = 0.0
    tie_output: bool = False
    qkv_bias: bool = False
    linear_bias: bool = False
    qk_norm: bool = False
    joint_qk_norm: bool = False
    attention_output_gate: bool = False
    linear_attention: LinearAttentionConfig | None = None
    mla: MlaConfig | None = None
    local_rotary_base: float | None = None
    sliding_window: int | None = None
    sliding_layers: list[int] = field(default_factory=list)
    attention_sinks: bool = False
    softmax_scale: float | None = None
    attention_soft_cap: float | None = None
    output_soft_cap: float | None = None
    zero_centered_norm: bool = False
    sandwich_norm: bool = False
    embedding_scale: float = 1.0
    moe: MoeConfig | None = None
    vision: VisionConfig | None = None
    mrope: MropeConfig | None = None

    @property
    def rotary_dim(self) -> int:
        """The rotated width of a query or key head."""
        return int(self.head_dim * self.rotary_percent) if self.mla is None else self.mla.qk_rope_head_dim

    def has_experts(self, layer: int) -> bool:
        """Whether ``layer`` (from 0) has a mixture of experts instead of the dense MLP."""
        return self.moe is not None and layer not in self.moe.dense_layers

    def is_linear(self, layer: int) -> bool:
        """Whether ``layer`` (from 0) has linear attention instead of attention over all tokens."""
        return self.linear_attention is not None and layer in self.linear_attention.layers

    def kind(self, layer: int) -> LayerKind:
        """The kind of ``layer`` (from 0)."""
        return LayerKind(self.has_experts(layer), self.is_linear(layer))

    @property
    def num_attention_layers(self) -> int:
        """Layers that attend; the others have linear attention."""
        return sum(not self.is_linear(layer) for layer in range(self.num_layers))
