"""What torch alone knows of devices and of the host memory that it keeps for them; a part of the device layer."""

from __future__ import annotations

import torch

from mcore_rl.parallel.device import Platform


def device_uuids(platform: Platform) -> tuple[str, ...]:
    """The UUIDs of the visible devices, by ordinal: the same in every process, while masks give other ordinals."""
    if not platform.is_accelerator:
        return ()
    return tuple(str(torch.cuda.get_device_properties(index).uuid) for index in range(platform.num_devices))


def pinned_bytes(platform: Platform) -> int:
    """Host memory that torch's page-locked allocator holds: rounded up as it does, what it keeps for later included."""
    if not platform.is_accelerator:
        return 0
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))
