"""Estimates how long the parts of a step take: matrix products, memory traffic, collectives.

None of them overlap, but moves of the optimizer's state between device and host (``offload_s``).

The estimates use data sheets and the assumed shares of them in ``overheads.py``.  They suffice to rank layouts, and to
tell an hour from a day.  Counts of operations are those of ``families/flops.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, log2

from mcore_rl.config.cluster import ClusterConfig
from mcore_rl.config.engine import Precision
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.rollout import (
    BYTES,
    UPDATE_BUCKET_BYTES,
    Quantization,
    RolloutConfig,
    RolloutLayout,
    state_bytes,
)
from mcore_rl.families.flops import PatchGrid, forward_flops, matmul_parameters, tower_flops
from mcore_rl.parallel.peak_flops import peak_tflops
from mcore_rl.planning.overheads import (
    CPU_CORE_GFLOPS,
    EAGER_LAYER_S,
    EXPERT_COLUMN_FLOPS,
    EXPERT_DECODE_S,
    HOST_LINK_GB_S,
    LAYER_LATENCY_S,
    LINK_EFFICIENCY,
    LOCAL_EFFICIENCY,
    LOCAL_EXPERT_EFFICIENCY,
    MATMUL_EFFICIENCY,
    MEMORY_EFFICIENCY,
    NODES_LATENCY_S,
    ROUND_IMBALANCE,
    ROUND_S,
    STEP_LATENCY_S,
    device_efficiency,
)
from mcore_rl.planning.serving import Serving, cache_bytes_per_token, rollout_weight_bytes
from mcore_rl.planning.training import RolePlan

UNKNOWN_TFLOPS = 300.0  # assumed for an accelerator that peak_flops.py does not list


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The rates that one rank is expected to reach, in operations or bytes per second.

    flops: matrix products.  memory: reading its memory.  intra, inter: sending inside the node, and to other nodes.
    per_node: ranks per node.  accelerator: whether it is one.  host: between the device and host memory.
    """

    flops: float
    memory: float
    intra: float
    inter: float
    per_node: int
    accelerator: bool
    host: float = HOST_LINK_GB_S * 1e9

    @classmethod
    def of(cls, cluster: ClusterConfig, per_node: int, precision: Precision, peak: float | None = None) -> Rates:
        """The rates on ``cluster``.  per_node: ranks per node.  peak: TFLOP/s of a device, if the run sets them."""
        accelerator = cluster.gpus_per_node > 0
        reached = cluster.reached
        if accelerator:
            known = peak or peak_tflops(cluster.device_name, precision) or UNKNOWN_TFLOPS
            flops = known * 1e12 * MATMUL_EFFICIENCY * device_efficiency(cluster.device_name)
            share = 1.0
        else:
            cores = CPU_CORE_GFLOPS[precision.value] * 1e9 * cluster.cpus_per_node
            flops = peak * 1e12 if peak else cores / per_node
            share = 1 / per_node
        return cls(
            flops=flops,
            memory=cluster.memory_gb_s * 1e9 * MEMORY_EFFICIENCY * share,
            intra=(reached.intra_node_gb_s or cluster.intra_node_gb_s * LINK_EFFICIENCY) * 1e9,
            inter=(reached.inter_node_gb_s or cluster.inter_node_gb_s * LINK_EFFICIENCY) * 1e9,
            per_node=per_node,
            accelerator=accelerator,
            host=(reached.host_link_gb_s or HOST_LINK_GB_S) * 1e9,
        )

    def link(self, size: int, stride: int = 1) -> float:
        """The rate of a group of ``size`` ranks, ``stride`` apart: of the slower link if the group spans nodes."""
        return self.intra if size * stride <= self.per_node else self.inter

    def ring(self, num_bytes: float, size: int, stride: int = 1) -> float:
        """Seconds to gather or reduce-scatter a tensor of ``num_bytes`` in all over a group."""
        return num_bytes * (size - 1) / size / self.link(size, stride) if size > 1 else 0.0


def compute_flops_rate(model: ModelConfig, rates: Rates, *, fused: bool = True) -> float:
    """Operations per second that layers of ``model`` reach.

    fused: they are Transformer Engine's, or an engine's, else the local ones.
    """
    return rates.flops * (layers_share(model, rates.flops, fused=fused) if rates.accelerator else 1.0)


def layers_share(model: ModelConfig, flops: float, *, fused: bool) -> float:
    """What layers of ``model`` reach of ``flops``, the rate of Transformer Engine's dense ones on the same device."""
    if model.moe is None:
        return 1.0 if fused else LOCAL_EFFICIENCY
    if not fused:
        return LOCAL_EXPERT_EFFICIENCY
    return 1 / (1 + flops / (EXPERT_COLUMN_FLOPS * model.moe.ffn_hidden_size))


def pass_s(role: RolePlan, rates: Rates, num_sequences: float, *, train: bool, num_updates: float = 1) -> float:
    """Seconds of one pass over ``num_sequences`` of the whole run: forward, or with ``train`` also backward.

    Includes collectives, the pipeline bubble, and sending between stages.
    num_updates: in which they are trained; each fills the pipeline anew.
    """
    model = role.model
    layout = role.layout
    work = role.work
    forward = role.sizes.forward_flops(max(1, round(work.mean))) * num_sequences
    if work.shared:
        forward -= role.sizes.forward_flops(work.shared) * work.again * num_sequences
    passes = 3 + role.recomputed_share if train else 1
    per_rank = forward * passes / layout.world_size
    compute = per_rank / compute_flops_rate(model, rates, fused=role.kernels.fused)
    tokens = num_sequences * work.computed / (layout.dp * layout.cp)  # rows of a context rank
    rounds = 3 + role.recomputed_share if train else 1
    communication = layer_communication_s(role, rates) * tokens * rounds
    microbatches = max(1.0, num_sequences / num_updates * work.computed / layout.dp / max(1, role.tokens))
    bubble = (layout.pp - 1) / (microbatches * layout.vpp)
    hand_on = 0.0
    if layout.pp > 1:
        row = role.kernels.size * model.hidden_size / layout.tp
        stride = layout.world_size // layout.pp
        hand_on = tokens * row * layout.vpp * (2 if train else 1) / rates.link(2, stride)
    stages = [(compute + communication) * share for share in role.stage_shares]
    stages[0] += tower_s(role, rates, num_sequences, train=train)
    return max(stages) * (1 + bubble) + hand_on


def tower_s(role: RolePlan, rates: Rates, num_sequences: float, *, train: bool) -> float:
    """Seconds of the vision tower in one pass: the ranks of the first stage share the pictures out.

    Every sequence's pictures are counted, though a microbatch encodes those that its sequences share once.  A picture
    is not split: where a microbatch has fewer than the ranks that share them, some wait.  A tower that learns computes
    its blocks again in backward; a frozen one has its forward pass alone.
    """
    if not role.tower_flops:
        return 0.0
    passes = 4 if train and role.learns_to_see else 1
    ranks = role.layout.world_size / role.layout.pp
    rate = rates.flops * (LOCAL_EFFICIENCY if rates.accelerator else 1.0)
    shown = len(role.work.pictures.mean) * max(1.0, role.tokens / role.work.computed)  # of a microbatch
    sharing = role.layout.tp * role.layout.cp
    busy = shown / (ceil(shown / sharing) * sharing)
    return role.tower_flops * num_sequences * passes / ranks / rate / busy


def layer_communication_s(role: RolePlan, rates: Rates) -> float:
    """Seconds of communication in a forward pass, per row of a context rank, over the layers of one stage."""
    model = role.model
    layout = role.layout
    e = role.kernels.size
    num_layers = model.num_layers / layout.pp
    row = e * model.hidden_size
    # Two gathers and two reduce-scatters of the whole rows in attention and MLP (arXiv:2205.05198, section 4.2.2).
    seconds = 4 * rates.ring(row, layout.tp) * num_layers
    attending = model.num_attention_layers / layout.pp
    if model.num_query_groups < layout.tp:  # queries, keys and values are gathered, and their gradients scattered
        heads = model.num_attention_heads * (2 if model.attention_output_gate else 1) + 2 * model.num_query_groups
        seconds += rates.ring(e * heads * model.head_dim, layout.tp) * attending
    if layout.cp > 1:
        keys = model.num_query_groups if model.mla is None else model.num_attention_heads
        width = 2 * e * max(1, keys / layout.tp) * model.head_dim * layout.cp
        seconds += rates.ring(width, layout.cp, layout.tp) * attending
        if (linear := model.linear_attention) is not None:
            gathered = 2 * linear.key_dim + linear.value_dim + 2 * linear.num_value_heads
            width = e * (gathered * layout.cp + linear.value_dim) / layout.tp  # the all-to-all, too
            seconds += rates.ring(width, layout.cp, layout.tp) * (num_layers - attending)
    if model.moe is not None:
        sparse = sum(model.has_experts(layer) for layer in range(model.num_layers)) / layout.pp
        sent = row * model.moe.top_k / layout.tp
        seconds += 2 * rates.ring(sent, layout.ep, layout.etp) * sparse
        seconds += 2 * rates.ring(sent * layout.etp, layout.etp) * sparse
    return seconds


def optimizer_s(role: RolePlan, rates: Rates) -> float:
    """Seconds of one optimizer step: reduce-scatter of gradients, memory traffic of the update, gather of weights."""
    layout = role.layout
    worst = role.heaviest
    seconds = (worst.gradients + 2 * worst.optimizer) / rates.memory
    seconds += rates.ring(worst.gradients, layout.dp * layout.cp, layout.tp)
    return seconds + rates.ring(worst.weights, layout.dp * layout.cp, layout.tp)


def update_s(role: RolePlan, rates: Rates, num_sequences: float, num_updates: float) -> float:
    """Seconds of all updates of a step, which process ``num_sequences`` in all."""
    passed = pass_s(role, rates, num_sequences, train=True, num_updates=num_updates)
    return passed + num_updates * optimizer_s(role, rates)


def generation_s(
    model: ModelConfig,
    config: RolloutConfig,
    room: Serving,
    rates: Rates,
    num_prompts: float,
    mean_prompt: float,
    mean_response: float,
    pictures: Sequence[PatchGrid] = (),
) -> tuple[float, float]:
    """Seconds to generate all responses: (of the engines, of the reductions of an engine on several nodes).

    Prefill is at the rate of matrix products, decode at the rate of memory.  The cache and ``max_num_seqs`` limit how
    many sequences run together; decode takes at least as many steps as the longest response has tokens.
    pictures: of a prompt, which an engine encodes once.
    """
    layout = config.layout
    size = BYTES[config.dtype]
    num_engines = layout.num_engines
    replicas = max(1, num_engines * layout.engine_dp)
    sequences = num_prompts * config.n / replicas
    held = (mean_prompt + mean_response / 2) * max(1, cache_bytes_per_token(model, config))
    held += state_bytes(model, config)
    together = max(1.0, min(config.max_num_seqs, max(0, room.cache) / held, sequences))
    steps = max(float(config.max_response_length), sequences * mean_response / together)
    active = sequences * mean_response / steps
    weights = streamed_bytes(model, config, size, active)
    seconds = steps * max(
        (weights + active * held) / rates.memory,
        2 * matmul_parameters(model) * active / layout.tp / rates.flops,
    )
    seconds += steps * decode_latency_s(model, config, rates)
    prompts = num_prompts * (1 if config.enable_prefix_caching else config.n) / replicas
    prefill = forward_flops(model, [max(1, round(mean_prompt))]) * prompts / layout.tp
    encoding = tower_flops(model, pictures) * num_prompts / replicas / layout.tp / rates.flops
    between = 0.0
    if rates.accelerator and layout.engine_size > rates.per_node:  # after attention, and after the experts or the MLP
        row = size * model.hidden_size
        decoding = steps * nodes_reduction_s(row * active, layout.engine_size, rates)
        between = decoding + nodes_reduction_s(row * mean_prompt * prompts, layout.engine_size, rates)
        between *= 2 * model.num_layers
    return seconds + prefill / compute_flops_rate(model, rates) + encoding, between


def decode_latency_s(model: ModelConfig, config: RolloutConfig, rates: Rates) -> float:
    """Seconds of a decode step besides reading weights and cache: scheduling, launches, small reductions."""
    if not rates.accelerator:
        return 0.0
    layer = EAGER_LAYER_S * config.enforce_eager + EXPERT_DECODE_S * (model.moe is not None)
    layer += 2 * LAYER_LATENCY_S * (config.layout.tp > 1 or config.layout.ep > 1)
    return STEP_LATENCY_S + model.num_layers * layer


def nodes_reduction_s(num_bytes: float, size: int, rates: Rates) -> float:
    """Seconds of an all-reduce of ``num_bytes`` over ``size`` neighbours on several nodes, whole nodes of them.

    The library sends by all links of a node at once, in as many rings: twice the tensor over them together, and no
    faster than inside a node.
    """
    links = min(rates.inter * rates.per_node, rates.intra)
    nodes = ceil(size / rates.per_node)
    return NODES_LATENCY_S * log2(max(2, nodes)) + 2 * num_bytes * (size - 1) / size / links


def streamed_bytes(model: ModelConfig, config: RolloutConfig, size: int, active: float) -> float:
    """Bytes of weights that a rank reads in a decode step of ``active`` sequences: no tower, no experts not chosen."""
    held = rollout_weight_bytes(replace(model, vision=None), config.layout, size, quantization=config.quantization)
    return held - idle_expert_bytes(model, config, size, active)


def idle_expert_bytes(model: ModelConfig, config: RolloutConfig, size: int, active: float) -> float:
    """Bytes of a rank's experts that none of ``active`` sequences chose in a decode step, without scales."""
    if model.moe is None:
        return 0.0
    size = size if config.quantization is Quantization.none else 1
    moe = model.moe
    layout = config.layout
    sparse = sum(model.has_experts(layer) for layer in range(model.num_layers))
    over = layout.tp if layout.ep == 1 else layout.ep
    experts = 3 * model.hidden_size * moe.ffn_hidden_size * moe.num_experts * sparse * size / over
    tokens = active * (layout.dp if layout.experts_span_replicas else 1)
    untouched: float = (1 - moe.top_k / moe.num_experts) ** max(1.0, tokens)
    return experts * untouched


@dataclass(frozen=True)
class UpdateSeconds:
    """The seconds of a weight update between nodes, and inside of them."""

    between: float
    inside: float

    @property
    def total(self) -> float:
        """The seconds of both, which follow one another."""
        return self.between + self.inside


def weights_s(
    role: RolePlan, rollout_bytes: int, layout: RolloutLayout, rates: Rates, *, separate: bool
) -> UpdateSeconds:
    """Seconds of a weight update along ``weights/rounds.py``; what it moves is an estimate, and no plan is made.

    Between nodes goes what a node's training ranks do not hold, once for all replicas on it; all of it goes inside the
    node, and is handed over on its device.  On the CPU, memory is written and read.

    separate: trainer and engines have their own devices.
    """
    held = [role.state(stage).weights for stage in range(role.layout.pp)]
    if not rates.accelerator:
        return UpdateSeconds(0.0, 2 * max(float(rollout_bytes), float(max(held))) / rates.memory)
    num_trainers = role.layout.world_size
    num_rollout = layout.world_size
    all_weights = role.sizes.num_parameters * role.kernels.size
    here = 0.0 if separate else min(1.0, min(rates.per_node, num_trainers) * sum(held) / len(held) / all_weights)
    replicas = max(1, min(rates.per_node, num_rollout) // layout.engine_size)
    coming = rollout_bytes * (1 - here) / replicas
    going = coming * num_rollout / num_trainers
    between = ROUND_IMBALANCE * max(coming, going) / rates.inter
    inside = rollout_bytes / rates.intra + (0.0 if separate else 2 * rollout_bytes / rates.memory)
    rounds = ROUND_S * ROUND_IMBALANCE * rollout_bytes / (UPDATE_BUCKET_BYTES / 2)
    return UpdateSeconds(between, inside + rounds)


def move_s(num_bytes: float, rates: Rates) -> float:
    """Seconds to move ``num_bytes`` between a device and host memory; on the CPU, to copy them."""
    return num_bytes / (rates.host if rates.accelerator else rates.memory / 2)


def offload_s(role: RolePlan, rates: Rates, beside_s: float) -> float:
    """Seconds that a step waits for ``role``'s state to leave its device and to come back.

    Weights are waited for each way.  The optimizer's state comes back beside the first minibatch's passes where
    ``overlap_offload`` says so; beside_s: the seconds of what it leaves beside, 0 where that is waited for.  The passes
    read no host memory, but a weight update between nodes takes the same lanes to the network's cards, so its seconds
    hide nothing.
    """
    state = max((role.state(stage) for stage in range(role.layout.pp)), key=lambda each: each.weights + each.optimizer)
    leaves = comes = move_s(state.optimizer, rates)
    if role.trains and rates.accelerator and role.engine.overlaps_offload(accelerator=True):
        comes = max(0.0, comes - pass_s(role, rates, role.work.sequences, train=True))
    return 2 * move_s(state.weights, rates) + comes + max(0.0, leaves - beside_s)
