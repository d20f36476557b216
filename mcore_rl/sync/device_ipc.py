"""The transport for one accelerator that trainer and engine share: both map its memory (CUDA and HIP IPC).

It uses torch's own reductions (torch/multiprocessing/reductions.py), which count the references of other processes.
No test runs it: it needs a GPU that two processes share.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from mcore_rl.parallel.device import Platform, synchronize
from mcore_rl.sync.members import Address, Members
from mcore_rl.sync.slots import SlotReceiving, SlotSender


@dataclass(frozen=True, kw_only=True)
class DeviceIpcTransport:
    """``Transport`` through device memory.

    platform: of both sides.  Each rollout rank must see the device of every training rank that sends to it.
    """

    address: Address
    platform: Platform
    in_place: ClassVar[bool] = False

    def outgoing(self, rank: int, device: torch.device) -> SlotSender:
        """The sending end; see ``Transport``."""
        assert self.platform.is_accelerator, "host memory is for shared_memory"
        members = Members.joined(self.address, rank)
        return SlotSender(members, _OnDevice(self.platform, device))

    def incoming(self, bucket_bytes: int, rollout_rank: int) -> SlotReceiving:
        """The receiving end; see ``Transport``."""
        members = Members.joined(self.address, self.address.num_trainers + rollout_rank)
        return SlotReceiving(members, _OnDevice(self.platform, torch.device(self.platform.device_type)), bucket_bytes)


@dataclass(frozen=True)
class _OnDevice:
    """``SlotMemory`` on a device; a handle is torch's pickled description of a shared tensor."""

    platform: Platform
    device: torch.device
    scarce: ClassVar[bool] = True

    def create(self, num_bytes: int) -> tuple[Tensor, bytes]:
        tensor = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        return tensor, pickle.dumps(reduce_tensor(tensor))  # type: ignore[no-untyped-call]

    def map(self, handle: bytes) -> Tensor:
        rebuild, arguments = pickle.loads(handle)
        tensor: Tensor = rebuild(*arguments)
        return tensor

    def settle(self) -> None:
        synchronize(self.platform)

    def forget(self, handle: bytes) -> None:
        pass  # torch frees it once no process maps it
