"""Where the time of a step goes: kernels by kind, and how long the device had nothing to do.

One step of ``steps.py``'s models under torch's profiler, after steps that warm up.  On an accelerator the kernels are
counted; on the CPU torch's operations, with the time in each beyond those that it calls.
"""

from __future__ import annotations

import gc
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import profile, supported_activities

from benchmarks.gpu_sections.section import GIB, Bench, Fact, Facts, guarded
from mcore_rl.config.engine import LayerSpec, Recompute
from mcore_rl.parallel.device import empty_cache, have_transformer_engine, memory, synchronize
from mcore_rl.parallel.groups import destroy_groups
from tests.support import train_steps

OTHER = "other"
# (kind, what the name of its kernels has, as regular expressions without case): the first that is found decides.
# Names are those of torch's kernels, of cuBLAS, CUTLASS, NCCL, of Triton (torch.compile's say what they fuse), of
# Transformer Engine, of hipBLASLt (Cijk_) and AOTriton (attn_fwd, bwd_kernel_), and of torch's operations on the CPU.
KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("communication", ("[nr]ccl", "gloo:", "c10d::", "nvshmem", "deep_ep")),
    ("attention", ("flash", "fmha", "sdpa", "attn_fwd", "bwd_kernel_d", "bwd_preprocess", "attention", "varlen_attn")),
    ("optimizer", ("adam", "multi_tensor_apply", "foreach")),
    (
        "matmul",
        (
            "gemm",
            "nvjet",
            "xmma",
            "cijk_",
            "gemv",
            "splitk",
            "cublas",
            "hipblas",
            "grouped_mm",
            "cutlass",
            r"aten::(add|b|badd)?mm\b",
            "aten::linear",
            "aten::dot",
            "custom_kernel_mfma",
        ),
    ),
    ("norm", ("rms_?norm", "layer_?norm", "rowwisemoments", "gammabeta", "rsqrt")),
    ("rope", ("rope", "rotary")),
    ("softmax and loss", ("softmax", "logsumexp", "nll_loss", "cross_entropy", "sum_kernel", "gradient_kernel")),
    ("compiled (torch.compile)", ("^triton_",)),
    (
        "indexing and sorting",
        (
            "index",
            "gather",
            "scatter",
            "sort",
            "radix",
            "topk",
            "nonzero",
            "flag_kernel",
            "calc_block_sums",
            "compute_agg",
            "write_fill_value",
            "devicescan",
            "kernel_scan",
            "scan_kernel",
            "compute_grad_weight",
            "cumsum",
            "embedding",
            "permute_kernel",
            "searchsorted",
            "bucketize",
            "masked_select",
        ),
    ),
    ("copy", ("memcpy", "memset", "copy", "catarray", "aten::cat", "fill", "aten::to", "clone", "transpose", "zero_")),
    ("elementwise", ("elementwise", "pointwise", "reduce_kernel", "aten::(add|mul|sub|div|silu|sigmoid)")),
)


@dataclass(frozen=True)
class Run:
    """One run of a kernel, or of an operation.  begin_us, end_us: on one clock.  busy_us: of it alone."""

    name: str
    begin_us: float
    end_us: float
    busy_us: float


def kind_of(name: str) -> str:
    """The kind of a kernel, by its name."""
    return next((kind for kind, parts in KINDS if any(re.search(part, name, re.I) for part in parts)), OTHER)


def busy_us(runs: Iterable[Run]) -> float:
    """Microseconds in which at least one of ``runs`` was running."""
    total, until = 0.0, float("-inf")
    for run in sorted(runs, key=lambda run: run.begin_us):
        total += max(0.0, run.end_us - max(run.begin_us, until))
        until = max(until, run.end_us)
    return total


def facts(bench: Bench) -> Facts:
    """The dense model and the mixture, on the local layers and on Transformer Engine's if there are any."""
    bench.rank.init_process_group(bench.platform)
    specs = [LayerSpec.local]
    if bench.platform.is_accelerator and have_transformer_engine():
        specs.append(LayerSpec.transformer_engine)
    for name in train_steps.NAMES:
        for spec in specs:
            yield from guarded(f"{name}, {spec.value}", of_step(bench, name, spec))


def of_step(bench: Bench, name: str, layer_spec: LayerSpec) -> Facts:
    """One step of one model."""
    platform = bench.platform
    case = f"{name}, {layer_spec.value}"
    gc.collect()  # the model before
    empty_cache(platform)
    least = train_steps.LEAST_MEMORY[Recompute.none]
    if platform.is_accelerator and memory(platform).free_bytes < least:
        yield Fact(what=f"{case}: left out", value="yes", beside=f"needs {least / GIB:.0f} GiB of device memory")
        return
    size = train_steps.SIZES[platform.is_accelerator][name]
    engine = train_steps.build(size, platform, layer_spec, Recompute.none)
    batch, counts = train_steps.batch_of(size)

    def step() -> None:
        engine.train_step(batch, train_steps.negative_log_likelihood, counts)
        synchronize(platform)

    for _ in range(train_steps.WARM_UP):
        step()
    plain_s = seconds(step)
    runs, wall_s = profiled(step, on_device=platform.is_accelerator)
    destroy_groups()
    yield from of_runs(case, runs, wall_s, plain_s)


def seconds(step: Callable[[], None]) -> float:
    """The seconds of ``step``."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def profiled(step: Callable[[], None], *, on_device: bool) -> tuple[list[Run], float]:
    """(what ran in ``step``, its seconds)"""
    with profile(activities=supported_activities()) as profiler:
        wall_s = seconds(step)
    return runs_of(profiler.events(), on_device=on_device), wall_s


def runs_of(events: Iterable[torch.autograd.profiler_util.FunctionEvent] | None, *, on_device: bool) -> list[Run]:
    """The kernels of the device, or the operations of the CPU; without our own and the profiler's marks."""
    runs = []
    for event in events or ():
        if event.is_user_annotation or (event.device_type == DeviceType.CPU) is on_device:
            continue
        begin = event.time_range.start
        end = event.time_range.end
        alone = end - begin if on_device else event.self_cpu_time_total
        if alone > 0:
            runs.append(Run(event.name, begin, end, alone))
    return runs


def of_runs(case: str, runs: list[Run], wall_s: float, plain_s: float) -> Facts:
    """A row for each kind, longest first, after the whole."""
    total = sum(run.busy_us for run in runs)
    yield Fact(
        what=f"{case}: busy share of a step",
        value=100 * busy_us(runs) / 1e6 / wall_s,
        unit="%",
        beside=f"{len(runs):,} runs in {1e3 * wall_s:.1f} ms under the profiler; {1e3 * plain_s:.1f} ms without",
        ok=bool(runs),
    )
    times, counts = defaultdict[str, float](float), Counter[str]()
    longest = defaultdict[str, Counter[str]](Counter)
    for run in runs:
        kind = kind_of(run.name)
        times[kind] += run.busy_us
        counts[kind] += 1
        longest[kind][run.name] += round(run.busy_us)
    for kind, microseconds in sorted(times.items(), key=lambda each: -each[1]):
        name, of_name = longest[kind].most_common(1)[0]
        share = 100 * microseconds / total
        yield Fact(
            what=f"{case}: {kind}",
            value=microseconds / 1e3,
            unit="ms",
            beside=f"{share:.1f} %, {counts[kind]:,} runs; most in {name[:80]}, {of_name / 1e3:.2f} ms",
        )
