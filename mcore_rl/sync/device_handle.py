"""Handles of device memory for another process, whose mask may give the same device another ordinal (CUDA and HIP IPC).

torch's own description of a shared tensor (torch/multiprocessing/reductions.py) names the device by the sender's
ordinal.  A trainer and an engine on one device hardly ever agree on it: each has a mask of its own.  So a handle also
has the UUID, and the receiver takes the ordinal at which it sees that device itself.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from mcore_rl.errors import SyncError
from mcore_rl.parallel.device import Platform
from mcore_rl.parallel.device_details import device_uuids

ORDINAL = "storage_device"  # torch's name for it among the arguments of the function that rebuilds the tensor


def handle_of(tensor: Tensor, platform: Platform) -> bytes:
    """A handle by which another process maps the memory of ``tensor``, which must outlive that process's use of it."""
    rebuild, arguments = reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    return pickle.dumps((device_uuids(platform)[arguments[ordinal_place(rebuild)]], rebuild, arguments))


def map_handle(handle: bytes, platform: Platform) -> Tensor:
    """The tensor of ``handle`` in this process, on the same memory.  Raises SyncError if its device is not visible."""
    uuid, rebuild, arguments = pickle.loads(handle)
    own = with_own_ordinal(arguments, ordinal_place(rebuild), uuid, device_uuids(platform))
    tensor: Tensor = rebuild(*own)
    return tensor


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
