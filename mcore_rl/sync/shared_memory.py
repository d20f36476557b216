"""One host, no accelerator: messages lie in files of /dev/shm, are written once and read where they lie.

A file is named in the store and unlinked when the update is over, or when its owner ends; what a killed owner leaves
behind is at most two messages, which the system drops when it restarts.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from mcore_rl.sync.members import Address, Members
from mcore_rl.sync.slots import SlotReceiving, SlotSender


@dataclass(frozen=True, kw_only=True)
class SharedMemoryTransport:
    """directory: on a file system in memory; the operating system's."""

    address: Address
    directory: Path = Path("/dev/shm")
    in_place: ClassVar[bool] = False

    def outgoing(self, rank: int, device: torch.device) -> SlotSender:
        """See ``Transport``."""
        assert device.type == "cpu", "an accelerator's memory is for device_ipc"
        members = Members.joined(self.address, rank)
        return SlotSender(members, _Files(self.directory))

    def incoming(self, bucket_bytes: int, rollout_rank: int) -> SlotReceiving:
        """See ``Transport``."""
        members = Members.joined(self.address, self.address.num_trainers + rollout_rank)
        return SlotReceiving(members, _Files(self.directory), bucket_bytes)


@dataclass(frozen=True)
class _Files:
    """``Memory``; a handle is the path and the size."""

    directory: Path

    def create(self, num_bytes: int) -> tuple[Tensor, bytes]:
        descriptor, path = tempfile.mkstemp(prefix="mcore_rl_weights_", dir=self.directory)
        # Allocated now: a full file system is an error here, and a bus error where it is written to.
        os.posix_fallocate(descriptor, 0, num_bytes)
        os.close(descriptor)
        return _mapped(path, num_bytes), f"{num_bytes} {path}".encode()

    def map(self, handle: bytes) -> Tensor:
        size, _, path = handle.decode().partition(" ")
        return _mapped(path, int(size))

    def settle(self) -> None:
        pass

    def forget(self, handle: bytes) -> None:
        with suppress(FileNotFoundError):
            os.unlink(handle.decode().partition(" ")[2])


def _mapped(path: str, num_bytes: int) -> Tensor:
    return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
