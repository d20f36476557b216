"""Assumed numbers with their reasons: memory of processes beside tensors, and the share of data-sheet rates reached.

Those of the CPU were measured (benchmarks/plan.py).  Those of accelerators are from the named sources, and times of
theirs from measured steps (measured_runs.yaml).  What one H200 said of them is in docs/gpu_facts.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from mcore_rl.config.cluster import ClusterConfig
from mcore_rl.parallel.pinned_size import block_bytes

GIB = 2**30

# A training process on the CPU, before its engine: Python, torch, Megatron, its groups over gloo, oneDNN's scratch.
CPU_PROCESS_BYTES = 407 * 2**20
# More as a Ray actor, which also imports ray and this package's runtime.
RAY_ACTOR_BYTES = 120 * 2**20
# glibc returns memory to the system at once only for pieces above its threshold, which grows to 32 MiB (mallopt(3),
# M_MMAP_THRESHOLD); smaller pieces leave holes that later ones do not fit into.  With the threshold fixed at 256 KiB,
# the peak of the benchmark's first case is the sum of its tensors, within 2 %.  With glibc's default, these two numbers
# fit all cases best: bytes per parameter (temporary gradients in the weights' dtype, and Adam's temporaries), and a
# share of the activations.
HEAP_LIMIT_BYTES = 32 * 2**20
HEAP_BYTES_PER_PARAMETER = 3.8
HEAP_SHARE = 0.35
# An engine: its Ray actor.  And on the CPU its main process, each of its ranks without weights and cache, and the
# controller with Ray's own processes.  All are proportional set sizes.
ENGINE_ACTOR_BYTES = 200 * 2**20
CPU_ENGINE_BYTES = 440 * 2**20
CPU_ENGINE_RANK_BYTES = 500 * 2**20
CPU_CONTROLLER_BYTES = 800 * 2**20
# A process's memory on an accelerator: the context with its loaded kernels (H100: 500 to 600 MB by nvidia-smi), and the
# workspaces of the matrix library (32 MiB per stream since Hopper).
CONTEXT_BYTES = int(0.6 * GIB)
# Buffers of the collectives' communicators, of 2 or more channels each; a training process has up to a dozen groups.
COLLECTIVE_BYTES = int(1.5 * GIB)
# torch's caching allocator reserves blocks: the share that is reserved but not allocated at the peak of a step.
FRAGMENTATION = 0.06
# A sleeping vLLM engine releases weights and cache, but keeps its context, graphs and communicators.
SLEEPING_ENGINE_BYTES = int(1.5 * GIB)
# Graphs of decode batches up to 256 sequences, per rank (vLLM logs 0.5 to 1 GiB on 7B to 70B models).
GRAPH_BYTES = int(0.8 * GIB)
# Host memory of a process beside an accelerator: libraries, pinned staging buffers, the interpreter.
HOST_PROCESS_BYTES = 3 * GIB

# The constants from here to ROUND_S are held against measured steps (measured_runs.yaml, docs/planning.md): nine were
# fitted to these, the others were assumed before and stood.
# Transformer Engine's dense layers in bfloat16: products alone reach 60 to 75 % of the data sheet on H100 (power
# throttled); with norms, rotations and launches between them, about half of it.
MATMUL_EFFICIENCY = 0.5
# What a device reaches of that share: others' software for it was tuned less when the rows were measured.
DEVICE_EFFICIENCY = (("MI300X", 0.65), ("MI325X", 0.65), ("B200", 0.6))
# The local dense layers, over Transformer Engine's: one H200, 37 % of the data sheet.
LOCAL_EFFICIENCY = 0.75
# Layers with experts take what dense ones would, and as long again where the operations take as many seconds by this
# rate: permuted rows, and a host that launches many small products.  The fewer columns an expert has, the more of these
# there are.  So mixtures with narrow experts gain little from a faster device, lose little on a slower one (verl has an
# MFU of 31 to 40 % for Qwen3-30B-A3B on H20), and Mixtral's reach nearly the rate of dense layers (arXiv:2504.14960).
EXPERT_COLUMN_FLOPS = 2.5e11  # for each column of an expert
# The local ones over Transformer Engine's dense layers, measured when experts were launched one by one.  As one grouped
# product they are not measured yet.
LOCAL_EXPERT_EFFICIENCY = 0.08
# The share of the data sheet's memory bandwidth that decode reaches when it reads weights and cache.
MEMORY_EFFICIENCY = 0.6
# The share of a link's data sheet that rings and all-to-alls reach.
LINK_EFFICIENCY = 0.7
# No collective is hidden behind computation: not the tensor-parallel ones (overlap is off), nor those of gradients.
# Of a small all-reduce inside a node, of which decode has two a layer and step; and of one over two nodes, once more
# for every doubling of the nodes.
LAYER_LATENCY_S = 1.5e-5
NODES_LATENCY_S = 7e-5
STEP_LATENCY_S = 4e-3  # scheduler and sampler of vLLM, between two decode steps
EXPERT_DECODE_S = 4e-5  # more of a layer with experts in a decode step: the router, and the small products' launches
EAGER_LAYER_S = 1.1e-3  # more of a layer whose kernels are launched one by one, without graphs (enforce_eager)
SWITCH_S = 3.0  # engines on the trainer's devices go to sleep and wake up: the least that published runs add to bytes
HOST_LINK_GB_S = 25.0  # PCIe 5 x16 with pinned memory: 50 by the data sheet, half of it in practice
# Weight updates go in rounds, and the slowest rank decides how long one takes: by how much it exceeds the mean, as
# benchmarks/reshard.py counts for the recipes (1.05 to 1.4; 3.9 for eight experts on 16 ranks).  And what a round costs
# besides its bytes: one batch of the vendor's library or two, and the hand-over on the device; assumed.
ROUND_IMBALANCE = 1.3
ROUND_S = 1.5e-3
# About the rate of a CPU core's float32 matrix products (AVX2, oneDNN); bfloat16 without AMX reaches a quarter of it.
CPU_CORE_GFLOPS = {"float32": 40.0, "bfloat16": 10.0}

# The expected mean lengths, as shares of the longest allowed; real data differ.  Only times depend on them: memory is
# planned for the longest.
MEAN_PROMPT_SHARE = 0.5
MEAN_RESPONSE_SHARE = 0.5
MEAN_IMAGE_SHARE = 0.5  # of a prompt

# (a word in the device's name, GB/s of its memory, GB/s to other devices of its node), from data sheets, one direction.
# For runs without a cluster's yaml.
DEVICE_RATES = (
    ("H200", 4800.0, 450.0),
    ("H100", 3350.0, 450.0),
    ("A100", 2039.0, 300.0),
    ("B200", 8000.0, 900.0),
    ("MI300X", 5300.0, 448.0),
    ("MI325X", 6000.0, 448.0),
    ("MI350X", 8000.0, 537.6),
    ("MI355X", 8000.0, 537.6),
    ("L40S", 864.0, 32.0),
    ("RTX 4090", 1008.0, 32.0),
)
UNKNOWN_RATES = 2000.0, 100.0  # assumed of devices that are not listed


@dataclass(frozen=True, kw_only=True)
class ProcessMemory:
    """What processes take beside the tensors of a plan, bytes: measured where ``measured`` has the name, else assumed.

    context, collectives: of a device.  trainer: of the host, by a training process.  engine: of the host, by an engine
    of one rank.  pinned_ratio: what a large page-locked block takes, over what was asked for.
    """

    context: int = CONTEXT_BYTES
    collectives: int = COLLECTIVE_BYTES
    trainer: int
    engine: int
    pinned_ratio: float = 1.0
    measured: frozenset[str] = frozenset()

    @classmethod
    def of(cls, cluster: ClusterConfig) -> ProcessMemory:
        """What processes take on ``cluster``.  Those that were measured were not Ray's yet, which takes more."""
        if cluster.gpus_per_node:
            trainer = engine = HOST_PROCESS_BYTES
        else:
            trainer = CPU_PROCESS_BYTES + RAY_ACTOR_BYTES
            engine = ENGINE_ACTOR_BYTES + CPU_ENGINE_BYTES + CPU_ENGINE_RANK_BYTES
        there = cluster.residuals
        measured = dict[str, Any]()
        for name, mib, more in (
            ("context", there.device_context_mib, 0),
            ("collectives", there.device_collectives_mib, 0),
            ("trainer", there.host_trainer_mib, RAY_ACTOR_BYTES),
            ("engine", there.host_engine_mib, ENGINE_ACTOR_BYTES),
        ):
            if mib is not None:
                measured[name] = round(mib * 2**20) + more
        if there.pinned_ratio is not None:
            measured["pinned_ratio"] = there.pinned_ratio
        return replace(cls(trainer=trainer, engine=engine), **measured, measured=frozenset(measured))

    def named(self, part: str, *names: str) -> str:
        """``part``, and that it was measured if all of ``names`` were."""
        return f"{part}, measured" if self.measured.issuperset(names) else part

    def on_device(self, world_size: int, num_roles: int) -> int:
        """What the training processes that share a device take of it."""
        return num_roles * (self.context + (self.collectives if world_size > 1 else 0))

    def of_engines(self, ranks: int, ranks_per_engine: int) -> int:
        """What the processes of engines on the CPU take; each rank after an engine's first is assumed."""
        engines = ceil(ranks / ranks_per_engine)
        return engines * self.engine + (ranks - engines) * CPU_ENGINE_RANK_BYTES

    def pinned(self, num_bytes: int) -> int:
        """What a page-locked block of ``num_bytes`` takes."""
        return round(block_bytes(num_bytes) * self.pinned_ratio)


def device_efficiency(device_name: str) -> float:
    """What a device reaches of ``MATMUL_EFFICIENCY``; 1 where that is not known."""
    return next((share for word, share in DEVICE_EFFICIENCY if word in device_name), 1.0)


def device_rates(device_name: str) -> tuple[float, float]:
    """(GB/s of the device's memory, GB/s of its links inside a node); assumed where no data sheet is known."""
    return data_sheet_rates(device_name) or UNKNOWN_RATES


def data_sheet_rates(device_name: str) -> tuple[float, float] | None:
    """(GB/s of the memory, GB/s inside a node) by the data sheet; None if the device is not listed."""
    return next(((memory, intra) for word, memory, intra in DEVICE_RATES if word in device_name), None)
