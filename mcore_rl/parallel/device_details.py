"""What torch and the kernel know of devices, what collectives know of interfaces, and queues of work.

A part of the device layer.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from mcore_rl.config.engine import Device
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.parallel.device import Platform
from mcore_rl.parallel.pinned import inherited_settings

rebuild_device_tensor = rebuild_cuda_tensor
DRIVERS = {Device.cuda: Path("/proc/driver/nvidia/version"), Device.rocm: Path("/sys/module/amdgpu/version")}
LOOPBACK = ("127.0.0.1", "::1")
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
# With it a group of the vendor's library has no watchdog.  One that sees a lost peer ends its process a minute later,
# and asks all who share the group's store to end too (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, 2.13).
UNWATCHED = {"TORCH_NCCL_BLOCKING_WAIT": "1"}
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
COPY_QUEUES = "CUDA_DEVICE_MAX_COPY_CONNECTIONS"


def device_uuids(platform: Platform) -> tuple[str, ...]:
    """The UUIDs of the visible devices, by ordinal: the same in every process, while masks give other ordinals."""
    if not platform.is_accelerator:
        return ()
    return tuple(str(torch.cuda.get_device_properties(index).uuid) for index in range(platform.num_devices))


@contextmanager
def without_expandable_segments() -> Iterator[None]:
    """Within: torch takes device memory that other processes of the device may map.

    Of segments that expand they may only where they may take one another's file descriptors (pidfd_getfd(2)), which
    containers forbid; torch's own message there (c10/cuda/CUDACachingAllocator.cpp, 2.11 and 2.13) advises this.
    """
    setter = torch._C._accelerator_setAllocatorSettings
    if hasattr(torch._C, "_accelerator_getAllocatorSettings"):
        before = torch._C._accelerator_getAllocatorSettings()
    else:  # 2.11, in which nothing of ours changes them
        before = inherited_settings(os.environ)
    fields = [field.strip() for field in before.split(",")]
    setter(",".join(field for field in fields if not field.startswith("expandable_segments:")))
    try:
        yield
    finally:
        setter(before)


def driver_version(kind: Device) -> str:
    """Version of the accelerators' kernel driver; "" if it is unknown, and on CPU."""
    text = DRIVERS[kind].read_text() if kind in DRIVERS and DRIVERS[kind].is_file() else ""
    return "".join(re.findall(r"\d+(?:\.\d+)+", text)[:1])


def pinned_bytes(platform: Platform) -> int:
    """Host memory that torch's page-locked allocator holds: rounded up as it does, what it keeps for later included."""
    if not platform.is_accelerator:
        return 0
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))


def interfaces(host: str) -> dict[str, str]:
    """The variables that keep collectives on the interface where this machine reaches ``host``, but for those set.

    Gloo would listen at whatever the host's name resolves to.  NCCL and RCCL are told only where all stay on one
    machine: between machines they may use several interfaces, and which is for the site to say.
    """
    name = interface_to(host)
    wanted = {GLOO_INTERFACE: name, NCCL_INTERFACE: name if host in LOOPBACK else None}
    return {key: value for key, value in wanted.items() if value is not None and key not in os.environ}


def work_queues(
    platform: Platform, parallel: ParallelConfig, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The variables by which a training process hides the communication of tensor and context ranks; {}: none needed.

    With one queue of work, kernels start in the order in which they were launched, and Megatron launches communication
    before the product that hides it: it requires this before Blackwell (training/arguments.py, 0.16.1).  Copies keep
    the eight queues that are CUDA's default, because the same variable would set theirs too.

    environ: of the run.  What is set there holds.  CUDA reads both variables when the process starts to use it.
    """
    if not platform.queues_reorder or max(parallel.tp, parallel.cp) == 1:
        return {}
    if QUEUES in environ:
        return {name: environ[name] for name in (QUEUES, COPY_QUEUES) if name in environ}
    return {QUEUES: "1", COPY_QUEUES: environ.get(COPY_QUEUES, "8")}


def interface_to(host: str) -> str | None:
    """The interface from which this machine reaches ``host``; None if it cannot be told."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # nothing is sent
            probe.connect((host, 9))
            own = probe.getsockname()[0]
    except OSError:
        return None
    names = (name for name, addresses in psutil.net_if_addrs().items() if own in {each.address for each in addresses})
    return next(names, None)


def current_device() -> torch.device | int:
    """Where Megatron makes tensors in this process: on the accelerator of ``set_device``, or on the CPU."""
    return torch.cuda.current_device()


def is_accelerators(tensor: Tensor) -> bool:
    """Whether ``tensor`` holds numbers in an accelerator's memory; not where either is pretended."""
    return tensor.is_cuda and torch.cuda.is_available() and type(tensor) is Tensor
