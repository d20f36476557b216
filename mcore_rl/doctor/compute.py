"""The check of what devices compute: the rate of matrix products, and that equal products have equal bits."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from mcore_rl.config.engine import Precision
from mcore_rl.doctor.checks import Diagnosis, ExpectedRate, HealthCheck, Subject, Verdict, judged
from mcore_rl.parallel.device import Platform, num_cores, set_device, synchronize
from mcore_rl.parallel.launch import Rank, run_ranks
from mcore_rl.parallel.peak_flops import peak_tflops
from mcore_rl.parallel.phase import phase
from mcore_rl.planning.overheads import CPU_CORE_GFLOPS, MATMUL_EFFICIENCY

T = TypeVar("T")
WARM_S = 0.5
ROUND_S = 0.2
ROUNDS = 7
SIZE = {True: 8192, False: 1024}  # by whether it is an accelerator: rows and columns of a square matrix
SLOWEST = 0.9  # of the median device, before it is worth a word


def rate_of(work: Callable[[], object], platform: Platform) -> float:
    """How often ``work`` is done in a second: the median of several rounds, after a warm-up."""
    started = time.perf_counter()
    count = 0
    while time.perf_counter() - started < WARM_S:
        work()
        synchronize(platform)
        count += 1
    each = max(1, int(count * ROUND_S / WARM_S))
    rates = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        for _ in range(each):
            work()
        synchronize(platform)
        rates.append(each / (time.perf_counter() - begun))
    return statistics.median(rates)


def on_devices(measure: Callable[[Rank, Platform], T], platform: Platform, limit_s: float) -> list[T]:
    """What ``measure`` gives on every device of a node at once; on the CPU in one process with all cores."""
    if platform.is_accelerator:
        return run_ranks(measure, platform.num_devices, (platform,), timeout_s=limit_s)
    return run_ranks(measure, 1, (platform,), timeout_s=limit_s, threads_per_rank=num_cores())


# ---- matrix products ----


@dataclass(frozen=True)
class MatmulResult:
    """tflops: of one device.  repeatable: whether the same product had the same bits each time."""

    tflops: float
    repeatable: bool


def measure_matmul(rank: Rank, platform: Platform) -> MatmulResult:
    """Square matrices in bfloat16 on an accelerator, in float32 on the CPU, where bfloat16 has no unit of its own."""
    device = set_device(platform, rank.rank)
    size = SIZE[platform.is_accelerator]
    dtype = torch.bfloat16 if platform.is_accelerator else torch.float32
    with phase("multiplying matrices", size=size):
        one, other = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        out = torch.empty_like(one)
        first = (one @ other).clone()
        rate = rate_of(lambda: torch.mm(one, other, out=out), platform)
        return MatmulResult(2 * size**3 * rate / 1e12, torch.equal(first, out))


def matmul_diagnosis(results: list[MatmulResult], platform: Platform, expected: ExpectedRate) -> Diagnosis:
    """The slowest device against ``expected``; FAIL where a device computes the same product in two ways."""
    rates = [each.tflops for each in results]
    slowest = rates.index(min(rates))
    where = f" on device {slowest}, the slowest of {len(rates)}" if len(rates) > 1 else ""
    unit = "TFLOP/s"
    remedy = "Look for heat, a power cap or another program on it: the vendor's tool shows clocks and power"
    diagnosis = judged("matmul", rates[slowest], unit, expected, remedy, key="matmul_tflops", where=where)
    if broken := [index for index, each in enumerate(results) if not each.repeatable]:
        measured = f"device {broken[0]} computed the same product twice with different bits"
        return replace(diagnosis, verdict=Verdict.FAIL, measured=measured, remedy="Leave the node out: it is broken")
    if diagnosis.verdict is Verdict.PASS and rates[slowest] < SLOWEST * statistics.median(rates):
        return replace(diagnosis, verdict=Verdict.WARN, remedy=remedy)
    return diagnosis


def _matmul(subject: Subject, limit_s: float) -> Iterator[Diagnosis]:
    platform = subject.platform
    results = on_devices(measure_matmul, platform, limit_s)
    if platform.is_accelerator:
        peak = peak_tflops(platform.device_name, Precision.bfloat16)
        source = "the data sheet" if peak else f"no peak is known of {platform.device_name}"
        expected = ExpectedRate(
            value=peak, source=source, passes=0.9 * MATMUL_EFFICIENCY, fails=0.5 * MATMUL_EFFICIENCY
        )
    else:  # a laptop does other things beside: slow is a word, never a failure
        cores = CPU_CORE_GFLOPS["float32"] * num_cores() / 1e3
        expected = ExpectedRate(value=cores, source=f"{num_cores()} cores in float32", passes=0.5, fails=0.0)
    yield matmul_diagnosis(results, platform, expected)


CHECKS = (
    HealthCheck(name="matmul", about="TFLOP/s beside the data sheet, and equal bits twice", limit_s=120, run=_matmul),
)
