"""A directory that all see, for engines elsewhere: a Hugging Face checkpoint for each version.  By names only.

Training ranks write it together (``checkpoints.export.save_hf``), whole and under its final name, and every rollout
rank reads it from there.  The store is still needed, to meet; the weights go through the file system, at its speed.
 The version before is removed once all have applied the new one.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from mcore_rl.checkpoints.export import save_hf
from mcore_rl.checkpoints.hf_directory import HfCheckpoint
from mcore_rl.checkpoints.safetensors import TensorSpec
from mcore_rl.errors import SyncError
from mcore_rl.sync.members import Address, Members
from mcore_rl.sync.transport import Receiving
from mcore_rl.weights.table import Table
from mcore_rl.weights.tensor_slice import TensorSlice

WHOLE_ONLY = "A directory takes whole tensors only: write mode=names, or choose another transport"


@dataclass(frozen=True, kw_only=True)
class DirectoryTransport:
    """root: where versions are written, ``root/CHANNEL/version-N``; on a file system that all members see."""

    address: Address
    root: Path
    in_place: ClassVar[bool] = False

    def outgoing(self, rank: int, device: torch.device) -> DirectoryWriter:
        """See ``Transport``."""
        return DirectoryWriter(Members.joined(self.address, rank), self.root)

    def incoming(self, bucket_bytes: int, rollout_rank: int) -> DirectoryReceiving:
        """See ``Transport``."""
        members = Members.joined(self.address, self.address.num_trainers + rollout_rank)
        return DirectoryReceiving(members, self.root, bucket_bytes)


def version_directory(root: Path, address: Address, version: int) -> Path:
    """Where a version is written: another place for each attempt to open the channel."""
    return root / address.name.replace("/", "-") / f"version-{version}"


class DirectoryWriter:
    """``Outgoing``, but for direct messages, which it refuses."""

    def __init__(self, members: Members, root: Path) -> None:
        self.members, self.root = members, root
        self._written: Path | None = None

    def save(self, chunks: Sequence[torch.nn.Module], table: Table, rank: int, version: int, dtype: torch.dtype) -> int:
        """Write ``version``, collectively over the training ranks; the bytes that this rank wrote.

        Raises CheckpointError as ``save_hf``: no space, or a version that was written before.
        """
        written: list[int] = []
        target = version_directory(self.root, self.members.address, version)
        target.parent.mkdir(parents=True, exist_ok=True)
        save_hf(chunks, table, rank, target, None, dtype=dtype, progress=written.append)
        previous, self._written = self._written, target
        self.members.meet("written", self.members.address.join_timeout_s)
        if previous is not None and self.members.member == 0:
            shutil.rmtree(previous, ignore_errors=True)  # all have applied it, or this version would not be written
        return sum(written)

    def buffer(self, num_bytes: int) -> Tensor:
        """Refused: see the module."""
        raise SyncError(WHOLE_ONLY)

    def send(self, message: Tensor, rollout_rank: int) -> None:
        """Refused as ``buffer``."""
        self.buffer(0)

    def flush(self) -> None:
        """Nothing is on its way."""

    def release(self) -> None:
        """There are no buffers."""

    def close(self) -> None:
        """See ``Outgoing``."""


class DirectoryReceiving(Receiving):
    """Reads what the training ranks wrote."""

    def __init__(self, members: Members, root: Path, bucket_bytes: int) -> None:
        super().__init__(members, bucket_bytes)
        self._root, self._version = root, -1

    def begin(self, version: int) -> None:
        """See ``Incoming``."""
        self._version = version
        super().begin(version)

    def messages(self, wanted: Sequence[tuple[int, int]], place: Callable[[int], Tensor]) -> Iterator[Tensor]:
        """Refused as the writer refuses, in the same words: either side may be the first to say so."""
        raise SyncError(WHOLE_ONLY)

    def named(self, specs: Mapping[str, TensorSpec]) -> Iterator[tuple[str, Tensor]]:
        """See ``Incoming``."""
        self.members.meet("written", self.members.address.join_timeout_s)
        with HfCheckpoint.open(version_directory(self._root, self.members.address, self._version)) as checkpoint:
            for name, spec in specs.items():
                tensor = torch.empty(spec.shape, dtype=spec.dtype)
                checkpoint.read_into(name, TensorSlice.whole(spec.shape), tensor)
                yield name, tensor
