"""Activation memory: what forward keeps for backward, layer by layer, and what backward of a layer needs besides.

Every term is a tensor that autograd saves.  For the local layers, the terms are what they were observed to save
(megatron-core 0.16.1, torch 2.13; benchmarks/plan.py measures the sum on the CPU, tests/rehearsal holds every recipe's
sum to a rehearsal with an accelerator's kernels); for Transformer Engine's, what its modules document (its fused norms
keep no float32 copy).  A term is bytes per row that the context rank holds; tensor ranks
split rows between the linears (sequence parallelism) and widths inside them.

Symbols, all for one rank: e bytes per element; widths h hidden, q and k of the query and key heads, f of the MLP:

    norm, twice     2 e h / tp: its input and the product.  On the CPU (4 + 2 e) h / tp: a float32 copy, the quotient,
                    the product
    attention       e (q + 2 k): the fused projection; of all ranks where key/value heads are fewer, since values are
                    a view of what is gathered.  e (q + k): rotated.  4 heads: sums of exponents.  e q: the
                    output, and e q once more where sequences are attended one by one and joined
    gated MLP       3 e f: the fused projection and its product
    experts         for each row sent to an expert: e h, and 3 e f of the expert
    logits          e V / tp; their gradient overwrites them (training/logprobs.py)

Deliberately left out: dropout, which nothing uses; biases, which save nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from mcore_rl.config.cluster import ClusterConfig
from mcore_rl.config.engine import EngineConfig, LayerSpec, Precision, Recompute, muon_problem
from mcore_rl.config.model import Activation, LayerKind, ModelConfig, TowerKind, VisionConfig
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.config.role import Head
from mcore_rl.config.rollout import BYTES
from mcore_rl.families.flops import patch_width

CHUNK = 64  # tokens of linear attention (training/delta_rule.py)
AnyEngine = TypeVar("AnyEngine", bound=EngineConfig)

# A rank may receive more rows than its share.  Random routers of 8 experts, measured over 2 to 8 ranks: 1.1 to 1.3
# times; trained routers are further from balance.
EXPERT_IMBALANCE = 1.5
ROUTER_BYTES_PER_EXPERT, ROUTER_BYTES_PER_CHOICE = 12, 32  # per row: scores, probabilities, maps; places and weights
LOSS_BYTES = 100  # per row: labels, masks, log-probs and what the losses compute from them
# Temporaries of a gated MLP's backward, in tensors of e f per row: the gradient of the product (1) and that of the
# projection (2).  That is all where one kernel makes the second from the first, as Transformer Engine does, and
# torch.compile with Megatron's silu and gate on accelerators (fusions/fused_bias_swiglu.py, 0.16.1).  The CPU, where
# nothing is compiled, also has the sigmoid, two products and the halves before they are joined (4).
GATE_TEMPORARIES = 3
GATE_TEMPORARIES_UNCOMPILED = 7
GATE_PIECE = 8192  # rows for which experts' unfused gate (gpt-oss) is computed at a time (training/grouped_experts.py)


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The kernels of a role's engine.

    fused: Transformer Engine's layers, else the local ones.
    one_by_one: attention runs one sequence at a time (on CPU), else one kernel for all.
    size: bytes per element of activations.
    """

    fused: bool
    one_by_one: bool
    size: int


def kernels_of(model: ModelConfig, parallel: ParallelConfig, engine: EngineConfig, *, accelerator: bool) -> Kernels:
    """The kernels that the engine chooses: ``auto`` is Transformer Engine on an accelerator if it has all features."""
    lacks = (
        model.attention_soft_cap is not None
        or model.attention_sinks
        or model.sandwich_norm
        or model.linear_attention is not None
        or (bool(model.sliding_layers) and parallel.cp > 1)
        or engine.precision is Precision.float32
        or muon_problem(engine.optim.optimizer) is not None
    )
    fused = accelerator and engine.layer_spec is not LayerSpec.local and not lacks
    return Kernels(fused=fused, one_by_one=not accelerator, size=BYTES[engine.precision])


def engine_on(cluster: ClusterConfig, engine: AnyEngine) -> AnyEngine:
    """``engine`` with the layers that ``layer_spec=auto`` comes to where ``cluster`` has no Transformer Engine."""
    if engine.layer_spec is LayerSpec.auto and not cluster.transformer_engine:
        return replace(engine, layer_spec=LayerSpec.local)
    return engine


@dataclass(frozen=True, kw_only=True)
class RowBytes:
    """Bytes of a layer per row of a context rank.

    kept: what is kept for backward without recompute.
    core: the part of ``kept`` that selective recompute does not keep.
    passed: the input of the layer, which is all that full recompute keeps.
    backward: the temporaries of the layer's backward.
    stacked: bytes of the layer however many rows there are: the local experts' larger matrices side by side, in every
    product, and their gradients before they are added; or a piece of their gate, if that is larger.
    """

    kept: float
    core: float
    passed: float
    backward: float
    stacked: float = 0.0

    def held(self, recompute: Recompute) -> float:
        """What one layer keeps for backward."""
        if recompute is Recompute.full:
            return self.passed
        return self.kept - (self.core if recompute is Recompute.selective else 0)

    def working(self, recompute: Recompute) -> float:
        """What backward of one layer needs beside ``held`` of all layers."""
        if recompute is Recompute.none:
            return self.backward
        return self.backward + (self.core if recompute is Recompute.selective else self.kept)


def layer_bytes(
    model: ModelConfig, parallel: ParallelConfig, kernels: Kernels, *, kind: LayerKind, longest: int
) -> RowBytes:
    """The bytes of a layer.  longest: tokens of the longest sequence (for unfused latent, and linear attention)."""
    e = kernels.size
    h = model.hidden_size
    tp = parallel.tp
    norms = 2 * _norm(model, kernels, h) / tp
    if model.sandwich_norm:
        norms *= 2
    if kind.is_linear:
        attention, core, attention_backward = _linear_attention(model, parallel, kernels, longest)
    else:
        attention, core, attention_backward = _attention(model, parallel, kernels, longest)
    if kind.has_experts:
        mlp, mlp_backward = _experts(model, parallel, kernels)
    else:
        mlp, mlp_backward = _gated(model, kernels, model.ffn_hidden_size / tp)
    gathered = e * h * (2 if tp > 1 else 1)  # a linear's input gathered again, and the gradient of it
    return RowBytes(
        kept=norms + attention + mlp,
        core=core,
        passed=e * h / tp,
        backward=gathered + max(attention_backward, mlp_backward),
        stacked=_stacked(model, parallel, kernels) if kind.has_experts else 0.0,
    )


def head_bytes(model: ModelConfig, parallel: ParallelConfig, kernels: Kernels, *, head: Head) -> RowBytes:
    """The bytes of what follows the last layer: norm, projection, and what the losses keep."""
    e = kernels.size
    h = model.hidden_size
    tp = parallel.tp
    outputs = {Head.lm: e * -(-model.vocab_size // tp), Head.value: 4 * (h / tp + 1), Head.hidden: e * h}[head]
    kept = _norm(model, kernels, h) / tp + outputs + LOSS_BYTES
    return RowBytes(kept=kept, core=0, passed=e * h / tp, backward=e * h)


@dataclass(frozen=True, kw_only=True)
class TowerBytes:
    """Bytes of a vision tower per patch that a rank encodes.

    kept: what a tower that learns keeps for backward: the inputs of its blocks, and what stands around them.
    block: what one block needs in backward, which computes it again.
    forward: the temporaries of a block in a pass without gradient.
    """

    kept: float
    block: float
    forward: float


def tower_bytes(vision: VisionConfig, size: int) -> TowerBytes:
    """The bytes of transformers' modules (5.19), whose norms of Qwen2.5-VL and rotations compute in float32.

    size: bytes per element of activations.
    """
    e = size
    w = vision.hidden_size
    f = vision.ffn_hidden_size
    if vision.kind is TowerKind.qwen2_5_vl:
        norm = 4 * w + e * w  # the input in float32, and the quotient
        mlp = 4 * e * f  # gate and up, the activation, their product
    else:
        norm = e * w
        mlp = 2 * e * f
    merger = norm + 2 * e * w
    around = e * patch_width(vision) + 2 * 4 * w / vision.num_heads + merger
    around += len(vision.deepstack) * 3 * e * w
    rotation = 4 * 4 * w  # queries and keys in float32, and their gradients or halves
    kept = 2 * (norm + e * w) + 8 * e * w + mlp
    return TowerBytes(
        kept=e * w * (vision.depth + 1) + around,
        block=kept + max(3 * e * f, rotation),
        forward=e * w + max(4 * e * w + rotation, 2 * e * w + mlp),
    )


def _norm(model: ModelConfig, kernels: Kernels, width: float) -> float:
    if not kernels.one_by_one:
        return 2 * kernels.size * width
    if model.zero_centered_norm:  # float32 until the end
        return (8 + kernels.size) * width
    return (4 + 2 * kernels.size) * width


def _attention(model: ModelConfig, parallel: ParallelConfig, kernels: Kernels, longest: int) -> tuple[float, ...]:
    """(kept, the part of it that is core attention's, temporaries of backward), bytes per row."""
    e = kernels.size
    tp = parallel.tp
    heads = model.num_attention_heads / parallel.tp
    if model.mla is not None:
        return _latent_attention(model, parallel, kernels, longest)
    q = heads * model.head_dim
    k = max(1, model.num_query_groups / tp) * model.head_dim
    projected = q + 2 * k
    gathered = 0.0  # beside the projection, in backward: its gradient in all ranks' heads, and cut for each rank
    if tp > model.num_query_groups:
        projected = (model.num_attention_heads + 2 * model.num_query_groups) * model.head_dim
        gathered = 2 * e * projected
    inputs = e * projected + e * (q + k)
    if parallel.cp > 1:  # keys and values of all context ranks; backward does not read the projection again
        inputs = e * q + 2 * e * k * parallel.cp
    if model.qk_norm and (kernels.one_by_one or model.joint_qk_norm):
        inputs += (q + k) * (4 + e)
    elif model.qk_norm:
        inputs += e * q  # queries are copied out of the projection, keys lie there
    if model.attention_output_gate:  # the gates beside the queries, their sigmoid, and the product
        inputs += e * q + 4 * q + e * q
    joined = kernels.one_by_one and model.attention_soft_cap is None and not model.attention_sinks
    core = 4 * heads + (e * q if joined else 0)
    return inputs + core + e * q, core, 2 * e * (q + 2 * k) + gathered


def _linear_attention(
    model: ModelConfig, parallel: ParallelConfig, kernels: Kernels, longest: int
) -> tuple[float, ...]:
    """(kept, the part of it that is the rule's, temporaries of backward), bytes per row.

    The rule's terms are float32 and of all context ranks' rows (``training/delta_rule.py``); context ranks divide the
    heads among them, if they can (``training/gated_delta_net.py``).

    Of the convolution: a copy of its channels for each tap, its sum and what SiLU makes of it.  Of the rule, in whole
    chunks: eight tensors as wide as the keys and two that products copy, three as wide as the values, five as a chunk,
    and a state per chunk.
    """
    linear = model.linear_attention
    e = kernels.size
    tp = parallel.tp
    assert linear is not None
    heads = linear.num_value_heads / tp
    values = linear.value_dim / tp
    keys = heads * linear.key_head_dim
    channels = (2 * linear.key_dim + linear.value_dim) / tp
    turns = -(-longest // CHUNK)
    whole = turns * CHUNK / longest
    per_head = 5 * CHUNK + 4 + linear.key_head_dim * linear.value_head_dim / CHUNK
    in_chunks = (10 - 1 / turns) * keys + 3 * values + heads * per_head
    times = 1 if linear.num_key_heads // tp % parallel.cp == 0 else parallel.cp
    core = 4 * ((linear.conv_kernel_dim + 2) * channels + 3 * heads + whole * in_chunks) * times
    inputs = e * (channels + 2 * heads)  # which the rule is computed from again
    after = 2 * 4 * values + e * values
    after += ((4 + 2 * e) if kernels.one_by_one else 2 * e) * values
    return inputs + core + after, core, 4 * (8 * keys + 6 * values + 3 * heads * CHUNK) * whole * times


def _latent_attention(
    model: ModelConfig, parallel: ParallelConfig, kernels: Kernels, longest: int
) -> tuple[float, ...]:
    mla = model.mla
    e = kernels.size
    tp = parallel.tp
    assert mla is not None
    heads = model.num_attention_heads / tp
    q = heads * model.head_dim
    v = heads * mla.v_head_dim
    latents = _norm(model, kernels, mla.kv_lora_rank + (mla.q_lora_rank or 0)) / tp
    keys = 1 if parallel.cp == 1 else parallel.cp
    inputs = latents + e * q + keys * e * (q + v) + 2 * e * mla.qk_rope_head_dim
    core = 4 * heads
    if kernels.one_by_one:
        core += e * v + 2 * e * heads * longest  # no kernel takes values narrower than keys, so scores are materialised
    return inputs + core + e * v, core, 2 * e * (2 * q + v)


def _gated(model: ModelConfig, kernels: Kernels, width: float) -> tuple[float, float]:
    """(kept, temporaries of backward) of a gated MLP of ``width`` on this rank."""
    kept = 3 if kernels.fused or model.activation is Activation.silu else 4
    return kept * kernels.size * width, _gate_temporaries(kernels) * kernels.size * width


def _gate_temporaries(kernels: Kernels) -> int:
    return GATE_TEMPORARIES_UNCOMPILED if kernels.one_by_one else GATE_TEMPORARIES


def _experts(model: ModelConfig, parallel: ParallelConfig, kernels: Kernels) -> tuple[float, float]:
    moe = model.moe
    e = kernels.size
    h = model.hidden_size
    tp = parallel.tp
    assert moe is not None
    sent = moe.top_k * parallel.etp / tp  # rows that an expert rank computes, for each row of a context rank
    if parallel.ep > 1:
        sent *= min(EXPERT_IMBALANCE, parallel.ep)
    width = moe.ffn_hidden_size / parallel.etp
    plain = model.activation is Activation.silu
    kept = sent * e * (h + 3 * width)
    kept += (ROUTER_BYTES_PER_EXPERT * moe.num_experts + ROUTER_BYTES_PER_CHOICE * moe.top_k) / tp
    temporaries = _gate_temporaries(kernels) if plain else GATE_TEMPORARIES
    backward = sent * e * (2 * h + temporaries * width)  # rows are sent there and back
    if moe.shared_ffn_hidden_size:
        shared, shared_backward = _gated(model, kernels, moe.shared_ffn_hidden_size / tp)
        kept = kept + shared
        backward = max(backward, shared_backward)
    return kept, backward


def _stacked(model: ModelConfig, parallel: ParallelConfig, kernels: Kernels) -> float:
    """Gate and up of all experts of a rank, or, at another time, a piece of an unfused gate; see ``RowBytes``.

    Of one expert nothing is stacked (``training/grouped_product.py``).
    """
    assert model.moe is not None
    if kernels.fused:
        return 0.0
    experts = model.moe.num_experts // parallel.ep
    width = model.moe.ffn_hidden_size / parallel.etp
    matrices = experts * 2 * width * model.hidden_size if experts > 1 else 0
    piece = 0.0 if model.activation is Activation.silu else GATE_PIECE * GATE_TEMPORARIES_UNCOMPILED * width
    return kernels.size * max(matrices, piece)
