"""What processes take besides tensors, and how much of a data sheet's rate is reached: assumed numbers, each with why.

Those of the CPU were measured (benchmarks/plan.py).  Those of accelerators are what the sources say; no run of ours on
one has confirmed them, which docs/planning.md repeats.
"""

from __future__ import annotations

GIB = 2**30

# A training process on the CPU, before its engine: Python, torch, Megatron, its groups over gloo, oneDNN's scratch.
CPU_PROCESS_BYTES = 407 * 2**20
# And as a Ray actor, which imports ray and our runtime besides.
RAY_ACTOR_BYTES = 120 * 2**20
# glibc hands memory back to the system by itself only for pieces above its threshold, which grows to 32 MiB
# (mallopt(3), M_MMAP_THRESHOLD); smaller ones leave holes that others do not fit into.  With it fixed at 256 KiB the
# peak of the benchmark's first case is what its tensors sum up to, within 2 %.  As it is, these fit all cases best:
# bytes for each parameter (gradients in the weights' dtype, and Adam's temporaries, come and go), and a share of the
# activations.
HEAP_LIMIT_BYTES = 32 * 2**20
HEAP_BYTES_PER_PARAMETER = 3.8
HEAP_SHARE = 0.35
# An engine on the CPU: its Ray actor (200 MiB) and the process that takes its requests (440 MiB); and each of its
# ranks, without weights and cache.  Proportional set sizes, as of the controller with Ray's own processes.
CPU_ENGINE_BYTES = 640 * 2**20
CPU_ENGINE_RANK_BYTES = 500 * 2**20
CPU_CONTROLLER_BYTES = 800 * 2**20
# Of an accelerator, per process: the context with its loaded kernels (H100: 500 to 600 MB by nvidia-smi), and the
# workspaces of the matrix library (32 MiB a stream since Hopper).
CONTEXT_BYTES = int(0.6 * GIB)
# Buffers of the collectives' communicators, 2 channels' worth and up each; a training process has up to a dozen groups.
COLLECTIVE_BYTES = int(1.5 * GIB)
# torch's caching allocator reserves in blocks: what is reserved beyond what is allocated at the peak of a step.
FRAGMENTATION = 0.06
# A sleeping vLLM engine gives back weights and cache, not its context, graphs and communicators.
SLEEPING_ENGINE_BYTES = int(1.5 * GIB)
# Graphs of decode batches up to 256 sequences, per rank (vLLM logs 0.5 to 1 GiB on 7B to 70B models).
GRAPH_BYTES = int(0.8 * GIB)
# Host memory of a process beside an accelerator: libraries, pinned staging buffers, the interpreter.
HOST_PROCESS_BYTES = 3 * GIB

# Dense bfloat16 products of the sizes of a transformer reach 60 to 75 % of the data sheet on H100 (power throttled);
# with norms, rotations and launches between them about half of it.
MATMUL_EFFICIENCY = 0.5
# Small expert products and rows in no order cost more: published Mixtral and DeepSeek trainings reach two thirds of
# what dense models do.
EXPERT_EFFICIENCY = 0.67
# Streaming weights and cache in decode, of the data sheet's memory bandwidth.
MEMORY_EFFICIENCY = 0.6
# Rings and all-to-alls, of a link's data sheet.
LINK_EFFICIENCY = 0.7
# Of collectives that Megatron hides behind products (tensor-parallel ones with overlap off: none; gradients: none).
LAYER_LATENCY_S = 8e-6  # of a small all-reduce inside a node, twice a layer and token in decode
STEP_LATENCY_S = 4e-3  # scheduler and sampler of vLLM, between two decode steps
HOST_LINK_GB_S = 25.0  # PCIe 5 x16 and pinned memory: 50 by the sheet, half of it in practice
HOST_COLLECTIVE_GB_S = 1.5  # gloo through host memory, where colocated processes exchange weights

# A CPU core computes float32 products at about this rate (AVX2, oneDNN), bfloat16 ones without AMX at a quarter of it.
CPU_CORE_GFLOPS = {"float32": 40.0, "bfloat16": 10.0}

# Lengths that a step is expected to have, of the longest that are allowed.  A run's own data decide; only times hang
# on it, memory is planned for the longest.
MEAN_PROMPT_SHARE = 0.5
MEAN_RESPONSE_SHARE = 0.5

# What a device calls itself contains the word of a row: GB/s of its memory, and to its node (data sheets, one
# direction).  For runs without a cluster's yaml; the last is for those that nobody knows.
DEVICE_RATES = (
    ("H200", 4800.0, 450.0),
    ("H100", 3350.0, 450.0),
    ("A100", 2039.0, 300.0),
    ("B200", 8000.0, 900.0),
    ("MI300X", 5300.0, 448.0),
    ("MI325X", 6000.0, 448.0),
    ("", 2000.0, 100.0),
)


def device_rates(device_name: str) -> tuple[float, float]:
    """GB/s of the memory of a device, and of its links inside a node."""
    return next((memory, intra) for word, memory, intra in DEVICE_RATES if word in device_name)
