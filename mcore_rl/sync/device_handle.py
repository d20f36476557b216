"""Device memory that another process maps, whose mask may give the same device another ordinal (CUDA and HIP IPC).

torch's own description of a shared tensor (torch/multiprocessing/reductions.py) names the device by the sender's
ordinal.  A trainer and an engine on one device hardly ever agree on it: each has a mask of its own.  So a handle also
has the UUID, and the receiver takes the ordinal at which it sees that device itself.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from mcore_rl.errors import SyncError
from mcore_rl.parallel.device import Platform, synchronize
from mcore_rl.parallel.device_details import device_uuids

ORDINAL = "storage_device"  # torch's name for it among the arguments of the function that rebuilds the tensor


@dataclass(frozen=True)
class DeviceMemory:
    """``SlotMemory`` on a device.  A handle is torch's description of a shared tensor, and the UUID of its device."""

    platform: Platform
    device: torch.device
    scarce: ClassVar[bool] = True

    def create(self, num_bytes: int) -> tuple[Tensor, bytes]:
        """See ``SlotMemory.create``."""
        tensor = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        rebuild, arguments = reduce_tensor(tensor)  # type: ignore[no-untyped-call]
        uuid = device_uuids(self.platform)[arguments[ordinal_place(rebuild)]]
        return tensor, pickle.dumps((uuid, rebuild, arguments))

    def map(self, handle: bytes) -> Tensor:
        """See ``SlotMemory.map``.  Raises SyncError if this process does not see the device."""
        uuid, rebuild, arguments = pickle.loads(handle)
        own = with_own_ordinal(arguments, ordinal_place(rebuild), uuid, device_uuids(self.platform))
        tensor: Tensor = rebuild(*own)
        return tensor

    def settle(self) -> None:
        """See ``SlotMemory.settle``."""
        synchronize(self.platform)

    def forget(self, handle: bytes) -> None:
        """See ``SlotMemory.forget``; torch frees the memory once no process maps it."""


def ordinal_place(rebuild: Callable[..., Any]) -> int:
    """Where the sender's ordinal stands among the arguments of ``rebuild``; torch has moved others before."""
    names = list(inspect.signature(rebuild).parameters)
    assert ORDINAL in names, f"torch rebuilds tensors of this device by {names}: no memory of a device that is shared"
    return names.index(ORDINAL)


def with_own_ordinal(arguments: Sequence[Any], place: int, uuid: str, uuids: Sequence[str]) -> tuple[Any, ...]:
    """``arguments`` with the ordinal at which this process sees device ``uuid``.  uuids: of its devices, by ordinal."""
    if uuid not in uuids:
        raise SyncError(
            f"device {uuid} holds the memory to be mapped, and this process sees {', '.join(uuids) or 'no device'}. "
            "Put both processes on one device, or widen the mask of this one"
        )
    return (*arguments[:place], list(uuids).index(uuid), *arguments[place + 1 :])
