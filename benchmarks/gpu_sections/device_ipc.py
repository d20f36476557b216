"""Device memory mapped by a second process: checksums both ways, under masks by which the device has other ordinals.

The sender's process holds a gigabyte; the receiver's maps it, sums it, copies it and writes into it, and the sender
sums again.  One device has ordinal 0 on both sides, whatever the masks; with several, the last one has another.
On the CPU a file takes the place of the device's memory: that is a run of this program, and no fact.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu_sections.section import FAILED, GB, GIB, Bench, Fact, Facts, guarded
from mcore_rl.config.engine import Device
from mcore_rl.parallel.device import consistent_environment, detect, set_device, synchronize
from mcore_rl.parallel.device_details import device_uuids
from mcore_rl.parallel.launch import Rank, inherited_environment, run_ranks
from mcore_rl.sync.device_handle import DeviceMemory

NUM_BYTES = GIB
TINY_BYTES = 64 * 1_024
RECEIVER_LIMIT_S = 90.0


@dataclass(frozen=True)
class Received:
    """What the other process saw.  device: with its ordinal there.  seen: the checksum before it wrote."""

    device: str
    seen: int
    map_s: float
    copy_bytes_s: float


def checksum(block: Tensor) -> int:
    """A number that changes with any byte's value or place: a sum of words times odd numbers, mod 2**64."""
    words = block.view(torch.int64)
    places = torch.arange(1, 2 * words.numel(), 2, dtype=torch.int64, device=block.device)
    return int((words * places).sum().item())


def shared_block(bench: Bench, device: torch.device) -> tuple[Tensor, bytes]:
    """Random bytes, and what the other process maps them by."""
    if bench.platform.is_accelerator:
        block, handle = DeviceMemory(bench.platform, device).create(NUM_BYTES)
        return block.random_(), handle
    descriptor = os.memfd_create("block")
    os.truncate(descriptor, TINY_BYTES)
    handle = f"/proc/{os.getpid()}/fd/{descriptor}".encode()
    return from_file(handle).random_(), handle


def from_file(handle: bytes) -> Tensor:
    """The bytes of a file, on which any process that maps it writes."""
    return torch.from_file(handle.decode(), shared=True, size=TINY_BYTES, dtype=torch.uint8)


def receive(rank: Rank, kind: Device, handle: bytes) -> Received:
    """The second process."""
    platform = detect(kind)
    device = set_device(platform, 0)
    torch.ones(1, device=device)
    synchronize(platform)
    start = time.perf_counter()
    block = DeviceMemory(platform, device).map(handle) if platform.is_accelerator else from_file(handle)
    map_s = time.perf_counter() - start
    seen = checksum(block)
    copy = torch.empty_like(block)
    copy.copy_(block)
    synchronize(platform)
    start = time.perf_counter()
    copy.copy_(block)
    synchronize(platform)
    rate = block.numel() / (time.perf_counter() - start)
    assert checksum(copy) == seen, "the copy differs from what was mapped"
    block.bitwise_not_()
    synchronize(platform)
    return Received(str(block.device), seen, map_s, rate)


def facts(bench: Bench) -> Facts:
    """Every mask that one machine can give."""
    for name, device, environment in masks(bench):
        yield from guarded(name, through(bench, name, device, environment))


def masks(bench: Bench) -> Iterator[tuple[str, torch.device, Mapping[str, str | None]]]:
    """(in words, the sender's device, the receiver's environment)."""
    platform = bench.platform
    first = bench.device
    uuids = device_uuids(platform)
    yield "the same mask on both sides", first, {}
    if uuids:
        yield "receiver masked by UUID", first, consistent_environment(platform.kind, [f"GPU-{uuids[0]}"])
    if len(uuids) > 1:
        last = torch.device(first.type, len(uuids) - 1)
        alone = consistent_environment(platform.kind, [f"GPU-{uuids[-1]}"])
        yield f"ordinal {len(uuids) - 1} of the sender is the receiver's 0", last, alone


def through(bench: Bench, name: str, device: torch.device, environment: Mapping[str, str | None]) -> Facts:
    """One block through one mask."""
    block, handle = shared_block(bench, device)
    sent = checksum(block)
    synchronize(bench.platform)
    with inherited_environment(environment):
        arguments = (bench.platform.kind, handle)
        (received,) = run_ranks(receive, 1, arguments, timeout_s=RECEIVER_LIMIT_S, context=bench.context)
    right = received.seen == sent and checksum(block.bitwise_not_()) == sent
    yield Fact(
        what=f"{name}: checksums",
        value="equal both ways" if right else FAILED,
        beside=f"{device} there, {received.device} here; mapped in {1e3 * received.map_s:.1f} ms",
        ok=right,
    )
    yield Fact(what=f"{name}: copy out of the mapped block", value=received.copy_bytes_s / GB, unit="GB/s")
