"""The machine: what is installed, what its memory and matrix units reach, what a process takes before any tensor."""

from __future__ import annotations

import importlib.metadata
import platform as interpreter
import time
from importlib.util import find_spec

import torch
from torch import Tensor

from benchmarks.gpu_sections.section import GB, GIB, MIB, Bench, Fact, Facts, Skipped
from mcore_rl.config.engine import Precision
from mcore_rl.parallel.device import memory, num_cores, synchronize
from mcore_rl.parallel.device_details import device_uuids, driver_version
from mcore_rl.parallel.peak_flops import peak_tflops
from mcore_rl.planning.overheads import CONTEXT_BYTES, data_sheet_rates

OPTIONAL = ("transformers", "transformer_engine", "apex", "flash_attn", "triton", "einops", "vllm", "ray", "pyarrow")
COMPILE_TOLERANCE = 1e-5  # float32, relative: other sums


def facts(bench: Bench) -> Facts:
    """Versions, then rates: they are what every other section is judged by."""
    yield from versions(bench)
    if bench.platform.is_accelerator:
        torch.ones(1, device=bench.device)
        synchronize(bench.platform)
        seen = memory(bench.platform)
        outside = seen.total_bytes - seen.free_bytes - seen.reserved_bytes
        assumed = f"planner: {CONTEXT_BYTES / MIB:.0f}; other processes' memory counts here"
        yield Fact(what="device memory taken before any tensor", value=outside / MIB, unit="MiB", beside=assumed)
    yield from rates(bench)


def versions(bench: Bench) -> Facts:
    """What runs where."""
    platform = bench.platform
    yield Fact(what="device", value=f"{platform.num_devices} x {platform.device_name}")
    yield Fact(what="device memory", value=platform.memory_total_bytes / GIB, unit="GiB")
    yield Fact(what="device UUIDs", value=", ".join(device_uuids(platform)) or "none")
    yield Fact(what="driver", value=driver_version(platform.kind) or "unknown")
    yield Fact(what="python, torch", value=f"{interpreter.python_version()}, {torch.__version__}")
    yield Fact(what="megatron-core", value=importlib.metadata.version("megatron-core"))
    yield Fact(what="cores", value=float(num_cores()))
    absent = [name for name in OPTIONAL if find_spec(name) is None]
    yield Fact(what="not installed", value=", ".join(absent) or "nothing of what is optional")


def rates(bench: Bench) -> Facts:
    """Matrix products and copies on the device, on random numbers: zeros run faster than what is real."""
    size = 256 if bench.tiny else 8_192
    for precision in Precision:
        dtype = {Precision.float32: torch.float32, Precision.bfloat16: torch.bfloat16}[precision]
        left, right = (torch.randn(size, size, device=bench.device).to(dtype) for _ in range(2))
        out = torch.empty_like(left)
        seconds = bench.seconds(lambda a=left, b=right, c=out: torch.mm(a, b, out=c), 10)  # type: ignore[misc]
        peak = peak_tflops(bench.platform.device_name, precision)
        beside = "data sheet: unknown" if peak is None else f"data sheet: {peak:g}"
        rate = 2 * size**3 / seconds / 1e12
        yield Fact(what=f"{precision.value} product of {size} x {size}", value=rate, unit="TFLOP/s", beside=beside)
        del left, right, out
    source = torch.randint(256, (MIB if bench.tiny else 4 * GIB,), dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    seconds = bench.seconds(lambda: target.copy_(source))
    sheet = data_sheet_rates(bench.platform.device_name)
    beside = "" if sheet is None else f"data sheet: {sheet[0]:g}"
    yield Fact(
        what="copy on the device, read and written", value=2 * source.nbytes / seconds / GB, unit="GB/s", beside=beside
    )


def gated(x: Tensor) -> Tensor:
    """Something to fuse, as Megatron does at its first forward pass."""
    left, right = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(left) * right


def compiler(bench: Bench) -> Facts:
    """Whether torch compiles here: Megatron's fused functions do it in the first step of every process."""
    if not bench.platform.is_accelerator:
        raise Skipped("on the CPU no process compiles")
    x = torch.randn(256, 512, device=bench.device)
    start = time.perf_counter()
    error = ((torch.compile(gated)(x) - gated(x)).norm() / gated(x).norm()).item()
    seconds = time.perf_counter() - start
    assert error < COMPILE_TOLERANCE, f"what was compiled is wrong: relative error {error:.1e}"
    yield Fact(what="first torch.compile of a process", value=seconds, unit="s")
