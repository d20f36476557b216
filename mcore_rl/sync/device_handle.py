"""Device memory that another process maps, whose mask may give the same device another ordinal (CUDA and HIP IPC).

torch's own description of a shared tensor (torch/multiprocessing/reductions.py) names the device by the sender's
ordinal.  A trainer and an engine on one device hardly ever agree on it: each has a mask of its own.  So a handle has
the UUID instead, and the receiver takes the ordinal at which it sees that device itself.

A handle is JSON of numbers and bytes.  What they are given to, torch's function and its classes, the receiver chooses.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from mcore_rl.ground.errors import SyncError
from mcore_rl.parallel.device import Platform, synchronize
from mcore_rl.parallel.device_details import device_uuids, rebuild_device_tensor, without_expandable_segments

ORDINAL = "storage_device"  # torch's name for it among the arguments of the function that rebuilds the tensor
# What a handle does not say, because it is the same for each.
FIXED: Mapping[str, Any] = {
    "tensor_cls": torch.Tensor,
    "storage_cls": torch.storage.TypedStorage,
    "dtype": torch.uint8,
    "requires_grad": False,
}


class _Handle(msgspec.Struct):
    """A slot of another process.  uuid: of its device.  values: the other arguments of torch's function, by name."""

    uuid: str
    values: dict[str, int | bool | bytes | list[int] | None]


@dataclass(frozen=True)
class DeviceMemory:
    """``SlotMemory`` on a device.  A handle is what torch says of a shared tensor, and the UUID of its device."""

    platform: Platform
    device: torch.device
    scarce: ClassVar[bool] = True

    def create(self, num_bytes: int) -> tuple[Tensor, bytes]:
        """See ``SlotMemory.create``."""
        with without_expandable_segments():
            tensor = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        rebuild, arguments = reduce_tensor(tensor)  # type: ignore[no-untyped-call]
        uuid = device_uuids(self.platform)[arguments[ordinal_place(rebuild)]]
        assert rebuild is rebuild_device_tensor, "the receiver takes this function, whatever a handle says"
        values = dict(zip(inspect.signature(rebuild).parameters, arguments, strict=True))
        said = {name: values.pop(name) for name in FIXED if name in values}
        assert all(said[name] == FIXED[name] for name in said), f"torch describes memory as {said}"
        return tensor, msgspec.json.encode(_Handle(uuid, values))

    def map(self, handle: bytes) -> Tensor:
        """See ``SlotMemory.map``.  Raises SyncError if this process does not see the device, or it is no handle."""
        try:
            known = msgspec.json.decode(handle, type=_Handle)
        except msgspec.MsgspecError as error:
            raise SyncError(f"The handle of device memory is none: {error}") from error
        names = inspect.signature(rebuild_device_tensor).parameters
        values = {**known.values, **FIXED}
        if missing := set(names) - set(values):
            raise SyncError(f"The handle of device memory lacks {', '.join(sorted(missing))}")
        arguments = [tuple(values[name]) if isinstance(values[name], list) else values[name] for name in names]
        place = ordinal_place(rebuild_device_tensor)
        own = with_own_ordinal(arguments, place, known.uuid, device_uuids(self.platform))
        tensor: Tensor = rebuild_device_tensor(*own)  # type: ignore[no-untyped-call]
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
