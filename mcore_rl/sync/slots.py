"""Messages in shared memory: each sender has two slots, which the receivers map.

The common part of ``shared_memory`` and of the second stage of ``routed``.  A sender says on its link to a receiver
which slot has a message, and reuses it when the receiver has confirmed, so no slot is read before it is written or
overwritten before it is read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from mcore_rl.sync.links import Link, Listener
from mcore_rl.sync.members import Members, PeerLostError
from mcore_rl.sync.transport import Receiving
from mcore_rl.weights.rounds import Round

NUM_SLOTS = 2
LENGTH, READ = struct.Struct("<I"), b"r"  # before a handle, in bytes; what a receiver answers


class SlotMemory(Protocol):
    """Memory for slots, which another process can map.

    scarce: both sides free it between updates; else they keep it until they leave, because new memory is slow to touch.
    """

    scarce: ClassVar[bool]

    def create(self, num_bytes: int) -> tuple[Tensor, bytes]:
        """(new tensor uint8 [num_bytes], handle for ``map`` in another process)."""
        ...

    def map(self, handle: bytes) -> Tensor:
        """The tensor that ``create`` made in another process."""
        ...

    def settle(self) -> None:
        """Wait for the work queued on this device, because the other process has its own queues."""
        ...

    def forget(self, handle: bytes) -> None:
        """Release ``handle``: no process will map it again."""
        ...


class SlotSender:
    """``Outgoing`` through slots."""

    def __init__(self, members: Members, memory: SlotMemory) -> None:
        self.members, self._memory = members, memory
        self._slots = [torch.empty(0, dtype=torch.uint8) for _ in range(NUM_SLOTS)]
        self._handles: list[bytes | None] = [None] * NUM_SLOTS
        self._readers: list[list[tuple[int, int]]] = [[] for _ in range(NUM_SLOTS)]  # (receiver, number of its message)
        self._links: dict[int, Link] = {}
        self._sent: dict[int, int] = {}
        self._confirmed: dict[int, int] = {}
        self._next = 0

    def buffer(self, num_bytes: int) -> Tensor:
        """See ``Outgoing.buffer``."""
        self._next = (self._next + 1) % NUM_SLOTS
        self._free(self._next)
        if len(self._slots[self._next]) < num_bytes:
            self._drop(self._next)
            self._slots[self._next], self._handles[self._next] = self._memory.create(num_bytes)
        return self._slots[self._next][:num_bytes]

    def send(self, message: Tensor, rollout_rank: int) -> None:
        """See ``Outgoing.send``."""
        self._memory.settle()
        handle = self._handles[self._next]
        assert handle is not None, "only what buffer gave is sent"
        peer = self.members.address.num_trainers + rollout_rank
        if peer not in self._links:
            self._links[peer] = Link.to(self.members, peer)
        self._links[peer].send(LENGTH.pack(len(handle)) + handle)
        self._sent[peer] = self._sent.get(peer, 0) + 1
        self._readers[self._next].append((peer, self._sent[peer]))

    def flush(self) -> None:
        """See ``Outgoing.flush``."""
        for index in range(NUM_SLOTS):
            self._free(index)

    def _free(self, index: int) -> None:
        for peer, number in self._readers[index]:
            while self._confirmed.get(peer, 0) < number:  # a receiver confirms in the order in which it reads
                self._links[peer].receive(len(READ))
                self._confirmed[peer] = self._confirmed.get(peer, 0) + 1
        self._readers[index] = []

    def _drop(self, index: int) -> None:
        handle, self._handles[index] = self._handles[index], None
        self._slots[index] = torch.empty(0, dtype=torch.uint8)
        if handle is not None:
            self._memory.forget(handle)

    def release(self) -> None:
        """See ``Outgoing.release``."""
        if self._memory.scarce:
            self._drop_all()

    def _drop_all(self) -> None:
        for index in range(NUM_SLOTS):
            self._drop(index)

    def close(self) -> None:
        """See ``Outgoing.close``."""
        self._drop_all()
        for link in self._links.values():
            link.close()
        self._links = {}


class SlotReceiving(Receiving):
    """``Incoming`` through slots."""

    def __init__(self, members: Members, memory: SlotMemory, bucket_bytes: int) -> None:
        super().__init__(members, bucket_bytes)
        self._memory, self._listener = memory, Listener(members)
        self._mapped: dict[bytes, Tensor] = {}  # the most recently read slot is the last

    def messages(self, wanted: Sequence[tuple[int, int]], rounds: Sequence[Round] = ()) -> Iterator[Tensor]:
        """See ``Incoming.messages``."""
        mapped = self._mapped
        for source, size in wanted:
            link = self._listener.link_from(source)
            handle = link.receive(LENGTH.unpack(link.receive(LENGTH.size))[0])
            mapped[handle] = mapped.pop(handle) if handle in mapped else self._map(handle, source)
            while sum(map(len, mapped.values())) > max(self.bucket_bytes // 2, len(mapped[handle])):
                mapped.pop(next(iter(mapped)))  # of a rank that may be done
            yield mapped[handle][:size]
            self._memory.settle()
            link.send(READ)
        if self._memory.scarce:
            self._mapped.clear()

    def close(self) -> None:
        """See ``Incoming.close``."""
        self._mapped.clear()
        self._listener.close()

    def _map(self, handle: bytes, source: int) -> Tensor:
        """Map ``handle``.  If that fails because ``source`` was killed after sending, raise PeerLostError for it."""
        try:
            return self._memory.map(handle)
        except Exception as error:
            if self.members.dies(source):
                title = self.members.address.title(source)
                raise PeerLostError(source, f"{title} is dead, and its memory gone") from error
            raise
