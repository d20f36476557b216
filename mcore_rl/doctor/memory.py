"""Checks of memory: a device's own, copies to and from the host, what pinning takes, memory that two processes map."""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Iterator
from multiprocessing.connection import Connection

import psutil
import torch

from mcore_rl.doctor.checks import (
    ACCELERATOR,
    Diagnosis,
    ExpectedRate,
    HealthCheck,
    Subject,
    Verdict,
    judged,
    problem_diagnosis,
)
from mcore_rl.doctor.compute import on_devices, rate_of
from mcore_rl.parallel.device import Platform, set_device, synchronize
from mcore_rl.parallel.device_details import pinned_bytes
from mcore_rl.parallel.launch import Rank, run_ranks
from mcore_rl.parallel.phase import phase
from mcore_rl.parallel.pinned_size import block_bytes
from mcore_rl.planning.overheads import HOST_LINK_GB_S, MEMORY_EFFICIENCY, data_sheet_rates
from mcore_rl.sync.device_handle import DeviceMemory
from mcore_rl.sync.shared_memory import MappedMemory
from mcore_rl.weights.fingerprint import fingerprint

DEVICE_BYTES, CPU_BYTES = 1 << 30, 1 << 26  # of a copy: far above caches
PINNED_BYTES = (512 << 20) + (64 << 20)  # a little above a power of two, where rounding up costs most
SHARED_ELEMENTS = 1 << 20
BLOCKS = 3
NOISE = 1.1  # of the system's own accounting


# ---- bandwidth ----


def measure_memory(rank: Rank, platform: Platform) -> float:
    """GB/s read and written by a copy within the memory of one device."""
    device = set_device(platform, rank.rank)
    size = DEVICE_BYTES if platform.is_accelerator else CPU_BYTES
    with phase("copying within memory"):
        source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
        return 2 * size * rate_of(lambda: target.copy_(source), platform) / 1e9


def _memory(subject: Subject, limit_s: float) -> Iterator[Diagnosis]:
    platform = subject.platform
    cluster = subject.cluster
    slowest = min(on_devices(measure_memory, platform, limit_s))
    value, source = (cluster.memory_gb_s, "the cluster's yaml") if cluster else (None, "no --cluster")
    sheet = data_sheet_rates(platform.device_name)
    if cluster is None and sheet is not None:
        value = sheet[0]
        source = "the data sheet"
    fails = 0.5 * MEMORY_EFFICIENCY if platform.is_accelerator else 0.0
    expected = ExpectedRate(value=value, source=source, passes=MEMORY_EFFICIENCY, fails=fails)
    remedy = "Look for another program, or a device with bad memory; mend memory_gb_s of the yaml if it is never more"
    yield judged("memory", slowest, "GB/s", expected, remedy, key="memory_gb_s")


def measure_host_copies(rank: Rank, platform: Platform) -> tuple[float, float]:
    """GB/s from pinned host memory to a device, and back, while every other device of the node does the same."""
    device = set_device(platform, rank.rank)
    with phase("pinning host memory"):
        host = torch.ones(DEVICE_BYTES, dtype=torch.uint8).pin_memory()
    there = torch.empty_like(host, device=device)
    with phase("copying to the device"):
        to_device = rate_of(lambda: there.copy_(host, non_blocking=True), platform)
    with phase("copying to the host"):
        to_host = rate_of(lambda: host.copy_(there, non_blocking=True), platform)
    return DEVICE_BYTES * to_device / 1e9, DEVICE_BYTES * to_host / 1e9


def host_copy_diagnoses(rates: list[tuple[float, float]]) -> Iterator[Diagnosis]:
    """rates: of every device, to it and from it.  The slowest is judged."""
    source = "what the planner assumes of a device while all of them copy"
    expected = ExpectedRate(value=HOST_LINK_GB_S, source=source, passes=0.8, fails=0.2)
    remedy = "See the PCIe width and generation of the device, and whether processes run on the socket that it is on"
    for index, (name, key) in enumerate((("to the device", "host_to_device"), ("to the host", "device_to_host"))):
        slowest = min(rate[index] for rate in rates)
        yield judged(f"pinned copies {name}", slowest, "GB/s", expected, remedy, key=f"{key}_gb_s")


def _host_copies(subject: Subject, limit_s: float) -> Iterator[Diagnosis]:
    rates = run_ranks(measure_host_copies, subject.num_ranks, (subject.platform,), timeout_s=limit_s)
    yield from host_copy_diagnoses(rates)


# ---- pinning ----


def measure_pinning(rank: Rank, platform: Platform) -> tuple[int, int]:
    """Bytes that ``PINNED_BYTES`` of pinned memory take: by torch's allocator, and of the system's free memory.

    The second is the median of several blocks, because other programs take and give memory, too.
    """
    set_device(platform, 0)
    torch.ones(1, device=platform.device_type)
    synchronize(platform)
    taken = []
    gone = []
    with phase("pinning host memory"):
        for _ in range(BLOCKS):
            before = pinned_bytes(platform)
            free = psutil.virtual_memory().available
            kept = torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True).fill_(1)
            taken.append(pinned_bytes(platform) - before)
            gone.append(free - psutil.virtual_memory().available)
            assert kept.is_pinned()
            del kept  # a large block goes back to the system (parallel/pinned_size.py)
    return taken[0], int(statistics.median(gone))


def pinning_diagnosis(taken: int, gone: int) -> Diagnosis:
    """taken: by the allocator; 0 if it does not say.  gone: of the system's free memory, by whomever.

    What is planned with is the larger: the allocator does not see what the driver adds.
    """
    planned = block_bytes(PINNED_BYTES)
    really = max(taken, gone)
    too_much = really > NOISE * planned
    return Diagnosis(
        check="pinning",
        verdict=Verdict.WARN if too_much else Verdict.PASS,
        measured=f"{PINNED_BYTES >> 20:,} MiB took {really / 2**20:,.0f} MiB, {really / PINNED_BYTES:.2f} times that",
        expected=f"at most {planned >> 20:,} MiB, as planned",
        remedy="Plan with this file (cluster.measured=doctor.json): host memory holds less than a plan says without it"
        if too_much
        else "",
        numbers={
            "pinned_taken_bytes": float(taken),
            "pinned_gone_bytes": float(gone),
            "pinned_ratio": max(1.0, round(really / planned, 4)),
        },
    )


def _pinning(subject: Subject, limit_s: float) -> Iterator[Diagnosis]:
    yield pinning_diagnosis(*run_ranks(measure_pinning, 1, (subject.platform,), timeout_s=limit_s)[0])


# ---- memory of two processes ----


def share(
    rank: Rank, platform: Platform, to_peer: tuple[Connection, Connection], to_owner: tuple[Connection, Connection]
) -> tuple[int, int]:
    """(fingerprint that this process expects, fingerprint that it sees) of memory that two processes map.

    It is the memory through which weights go from a trainer to an engine (``sync/``).  Rank 0 owns and fills it, rank 1
    maps it, and adds 1 in place.  Both look afterwards.
    """
    device = set_device(platform, 0)  # both on one device, as trainer and engine are
    memory = DeviceMemory(platform, device) if platform.is_accelerator else MappedMemory()
    expected = torch.arange(SHARED_ELEMENTS, dtype=torch.int32, device=device)
    if rank.rank == 0:
        with phase("sharing memory"):
            whole, handle = memory.create(4 * SHARED_ELEMENTS)
            mine = whole.view(torch.int32).copy_(expected)
            memory.settle()
            to_peer[1].send_bytes(handle)
            to_owner[0].recv_bytes()
        seen = fingerprint(mine, (0,))
        to_peer[1].send_bytes(b"seen")
        return fingerprint(expected + 1, (0,)), seen
    with phase("mapping the memory of another process"):
        theirs = memory.map(to_peer[0].recv_bytes()).view(torch.int32)
        seen = fingerprint(theirs, (0,))
        theirs += 1
        memory.settle()
        to_owner[1].send_bytes(b"changed")
        to_peer[0].recv_bytes()  # the owner must not end before
    return fingerprint(expected, (0,)), seen


def sharing_diagnosis(results: list[tuple[int, int]]) -> Diagnosis:
    """results: of the owner and of the peer, by ``share``."""
    (changed, owner_sees), (whole, peer_sees) = results
    wrong = [
        text
        for text, one, other in (
            ("the peer reads other values", whole, peer_sees),
            ("the owner does not see what the peer wrote", changed, owner_sees),
        )
        if one != other
    ]
    shown = f"{SHARED_ELEMENTS * 4 >> 20} MiB, equal checksums in both processes"
    remedy = "Weights cannot go from trainer to engine: start containers with --ipc=host and --pid=host"
    return problem_diagnosis("shared memory", wrong, shown, "one memory in two processes", remedy)


def _sharing(subject: Subject, limit_s: float) -> Iterator[Diagnosis]:
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(2)]  # (reader, writer): bytes between two children of ours
    results = run_ranks(share, 2, (subject.platform, *pipes), timeout_s=limit_s)
    for each in (end for pipe in pipes for end in pipe):
        each.close()
    yield sharing_diagnosis(results)


CHECKS = (
    HealthCheck(name="memory", about="GB/s of a copy within a device's memory", limit_s=90, run=_memory),
    HealthCheck(
        name="pinned copies",
        about="GB/s between pinned host memory and devices, all at once",
        limit_s=120,
        run=_host_copies,
        needs=(ACCELERATOR,),
    ),
    HealthCheck(
        name="pinning",
        about="how much host memory a pinned block really takes",
        limit_s=60,
        run=_pinning,
        needs=(ACCELERATOR,),
    ),
    HealthCheck(
        name="shared memory",
        about="two processes map one tensor (device IPC), with checksums",
        limit_s=60,
        run=_sharing,
    ),
)
