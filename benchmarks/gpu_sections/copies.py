"""Copies between host and device each way, and what page-locked memory really takes of the host."""

from __future__ import annotations

import time

import psutil
import torch

from benchmarks.gpu_sections.section import GB, GIB, MIB, Bench, Fact, Facts
from mcore_rl.parallel.device import pinned_empty_like, synchronize
from mcore_rl.parallel.device_details import pinned_bytes
from mcore_rl.planning.overheads import HOST_LINK_GB_S

BLOCKS_MIB = (100, 260, 520, 1_100, 2_100)  # torch rounds to powers of two: each falls into another one


def facts(bench: Bench) -> Facts:
    """Bandwidths, then blocks of page-locked memory."""
    on_device = torch.randint(256, (MIB if bench.tiny else GIB,), dtype=torch.uint8, device=bench.device)
    hosts = {
        "page-locked": pinned_empty_like(bench.platform, on_device).fill_(1),
        "pageable": torch.ones(on_device.numel(), dtype=torch.uint8),
    }
    for name, host in hosts.items():
        for direction, target, source in (("to the host", host, on_device), ("to the device", on_device, host)):
            seconds = bench.seconds(lambda a=target, b=source: a.copy_(b, non_blocking=True))  # type: ignore[misc]
            rate = on_device.numel() / seconds / GB
            beside = f"planner: {HOST_LINK_GB_S:g}" if name == "page-locked" else ""
            yield Fact(what=f"{name} memory, {direction}", value=rate, unit="GB/s", beside=beside)
    yield from locking(bench)


def locking(bench: Bench) -> Facts:
    """New blocks, all kept, so that none is given out again."""
    kept = []
    for mib in (1,) if bench.tiny else BLOCKS_MIB:
        like = torch.empty(mib * MIB, dtype=torch.uint8, device=bench.device)
        synchronize(bench.platform)
        before = pinned_bytes(bench.platform)
        available = psutil.virtual_memory().available
        start = time.perf_counter()
        kept.append(pinned_empty_like(bench.platform, like))
        seconds = time.perf_counter() - start
        taken = pinned_bytes(bench.platform) - before
        fell = (available - psutil.virtual_memory().available) / MIB
        rate = mib * MIB / seconds / GB
        beside = f"{seconds:.2f} s, {rate:.1f} GB/s of what was asked; available memory fell by {fell:.0f} MiB"
        if not bench.platform.is_accelerator:
            beside = "nothing is page-locked on the CPU"
        yield Fact(what=f"page-locked for {mib:,} MiB", value=taken / MIB, unit="MiB", beside=beside)
