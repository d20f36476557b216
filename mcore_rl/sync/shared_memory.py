"""The transport for one host without accelerator: both sides map the same memory, so a message is written only once.

The memory has no name in a file system: others open it through its owner's entry in /proc.  So the system frees it with
the last process that maps it, however that process ends.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mcore_rl.sync.members import Address, Members
from mcore_rl.sync.slots import SlotReceiving, SlotSender

NAME = "mcore_rl_weights"  # in the memory map of a process


@dataclass(frozen=True, kw_only=True)
class SharedMemoryTransport:
    """``Transport`` between processes of one user that see one another in /proc."""

    address: Address
    name: ClassVar[str] = "shared_memory"
    sites: ClassVar[None] = None

    def outgoing(self, rank: int, device: torch.device) -> SlotSender:
        """The sending end; see ``Transport``."""
        assert device.type == "cpu", "an accelerator's memory is for routed"
        members = Members.joined(self.address, rank)
        return SlotSender(members, MappedMemory())

    def incoming(self, bucket_bytes: int, rollout_rank: int) -> SlotReceiving:
        """The receiving end; see ``Transport``."""
        members = Members.joined(self.address, self.address.num_trainers + rollout_rank)
        return SlotReceiving(members, MappedMemory(), bucket_bytes)


class MappedMemory:
    """``SlotMemory`` on the host; a handle is size, owner, descriptor and inode, because descriptors are reused."""

    scarce: ClassVar[bool] = False

    def create(self, num_bytes: int) -> tuple[Tensor, bytes]:
        """See ``SlotMemory.create``."""
        descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC)
        # Allocate now: too little memory is an error here, and would be a bus error at the first write.
        os.posix_fallocate(descriptor, 0, num_bytes)
        handle = f"{num_bytes} {os.getpid()} {descriptor} {os.fstat(descriptor).st_ino}".encode()
        return self.map(handle), handle

    def map(self, handle: bytes) -> Tensor:
        """See ``SlotMemory.map``."""
        num_bytes, owner, descriptor, _ = map(int, handle.split())
        path = f"/proc/{owner}/fd/{descriptor}"
        return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)

    def settle(self) -> None:
        """See ``SlotMemory.settle``: nothing is queued."""

    def forget(self, handle: bytes) -> None:
        """See ``SlotMemory.forget``."""
        _, owner, descriptor, _ = map(int, handle.split())
        assert owner == os.getpid(), "who made it forgets it"
        os.close(descriptor)
