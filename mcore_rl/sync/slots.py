"""Messages in shared memory: each sender has two slots, which the receivers map.

The common part of ``shared_memory`` and ``device_ipc``.  A sender announces a slot through the store, and reuses it
when the receiver has confirmed there, so no slot is read before it is written or overwritten before it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from mcore_rl.sync.members import Members, PeerLostError
from mcore_rl.sync.transport import Receiving

NUM_SLOTS = 2


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
        self._readers: list[list[tuple[int, str]]] = [[] for _ in range(NUM_SLOTS)]
        self._sent: dict[int, int] = {}
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
        number = self._sent.get(rollout_rank, 0)
        self._sent[rollout_rank] = number + 1
        handle = self._handles[self._next]
        assert handle is not None, "only what buffer gave is sent"
        key = f"slot/{self.members.member}/{rollout_rank}/{number}"
        self.members.set(key, handle)
        self._readers[self._next].append((self.members.address.num_trainers + rollout_rank, f"{key}/read"))

    def flush(self) -> None:
        """See ``Outgoing.flush``."""
        for index in range(NUM_SLOTS):
            self._free(index)

    def _free(self, index: int) -> None:
        for reader, key in self._readers[index]:
            self.members.get(key, reader)
            self.members.delete(key)
        self._readers[index] = []

    def _drop(self, index: int) -> None:
        handle, self._handles[index] = self._handles[index], None
        self._slots[index] = torch.empty(0, dtype=torch.uint8)
        if handle is not None:
            self._memory.forget(handle)

    def release(self) -> None:
        """See ``Outgoing.release``."""
        if self._memory.scarce:
            self.close()

    def close(self) -> None:
        """See ``Outgoing.close``."""
        for index in range(NUM_SLOTS):
            self._drop(index)


class SlotReceiving(Receiving):
    """``Incoming`` through slots."""

    def __init__(self, members: Members, memory: SlotMemory, bucket_bytes: int) -> None:
        super().__init__(members, bucket_bytes)
        self._memory = memory
        self._received: dict[int, int] = {}
        self._mapped: dict[bytes, Tensor] = {}  # the most recently read slot is the last

    def messages(self, wanted: Sequence[tuple[int, int]], place: Callable[[int], Tensor]) -> Iterator[Tensor]:
        """See ``Incoming.messages``."""
        mapped = self._mapped
        me = self.members.member - self.members.address.num_trainers
        for source, size in wanted:
            number = self._received.get(source, 0)
            self._received[source] = number + 1
            key = f"slot/{source}/{me}/{number}"
            handle = self.members.get(key, source)
            self.members.delete(key)
            mapped[handle] = mapped.pop(handle) if handle in mapped else self._map(handle, source)
            while sum(map(len, mapped.values())) > max(self.bucket_bytes // 2, len(mapped[handle])):
                mapped.pop(next(iter(mapped)))  # of a rank that may be done
            yield mapped[handle][:size]
            self._memory.settle()
            self.members.set(f"{key}/read", b"1")
        if self._memory.scarce:
            self.close()

    def close(self) -> None:
        """See ``Incoming.close``."""
        self._mapped.clear()

    def _map(self, handle: bytes, source: int) -> Tensor:
        """Map ``handle``.  If that fails because ``source`` was killed after sending, raise PeerLostError for it."""
        try:
            return self._memory.map(handle)
        except Exception as error:
            if self.members.dies(source):
                title = self.members.address.title(source)
                raise PeerLostError(source, f"{title} is dead, and its memory gone") from error
            raise
