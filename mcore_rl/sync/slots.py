"""Messages in memory that both sides map: each sender has two slots, and says on a link which of them has a message.

The common part of ``shared_memory`` and of the second stage of ``routed``.  A sender reuses a slot when the receiver
has confirmed, so no slot is read before it is written or overwritten before it is read.

A link is a Unix socket for each pair of processes.  The store through which all members meet is one process for the
whole run: hundreds of ranks that told one another there of every message would wait for it.  A socket also says at once
when the other process is gone.  Its name is in no file system, and random; only a process of the same user is answered.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from mcore_rl.sync.members import LOOK_S, Members, PeerLostError
from mcore_rl.sync.transport import Receiving
from mcore_rl.weights.rounds import Round

T = TypeVar("T")
CREDENTIALS = struct.Struct("3i")  # of SO_PEERCRED: process, user, group
WHO = struct.Struct("<I")  # the first that is said on a link: the member


class Link:
    """A connection with member ``peer``."""

    def __init__(self, members: Members, peer: int, connection: socket.socket) -> None:
        self.members = members
        self.peer = peer
        self._connection = connection
        connection.settimeout(LOOK_S)

    @classmethod
    def to(cls, members: Members, peer: int) -> Link:
        """A link to the ``Listener`` of ``peer``.  Raises PeerLostError if it is gone."""
        name = members.get(f"link/{peer}", peer)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        link = cls(members, peer, connection)
        link._waited(partial(connection.connect, b"\0" + name))
        if not _is_of_this_user(connection):
            connection.close()
            raise PermissionError(f"{members.address.title(peer)} runs as another user: start both as one")
        link.send(WHO.pack(members.member))
        return link

    def send(self, data: bytes) -> None:
        """Send ``data``.  Raises PeerLostError if the peer is gone, or takes nothing."""
        left = memoryview(data)
        while left:
            left = left[self._waited(partial(self._connection.send, left)) :]

    def receive(self, num_bytes: int) -> bytes:
        """The next ``num_bytes``.  Raises PeerLostError if the peer is gone or silent, or any member failed."""
        received = b""
        while len(received) < num_bytes:
            more = self._waited(partial(self._connection.recv, num_bytes - len(received)))
            if not more:
                raise self._gone("connection closed")
            received += more
        return received

    def _waited(self, call: Callable[[], T]) -> T:
        until = time.monotonic() + self.members.address.timeout_s
        while True:
            try:
                return call()
            except TimeoutError:
                self.members.look_around([self.peer])
                if time.monotonic() > until:
                    limit = f"{self.members.address.timeout_s:g} s"
                    raise self._gone(f"timed out: nothing came for {limit}") from None
            except OSError as error:
                raise self._gone(str(error)) from error

    def _gone(self, how: str) -> PeerLostError:
        return PeerLostError(self.peer, f"{self.members.address.title(self.peer)}: {how}")

    def close(self) -> None:
        """Close the connection; the peer's waits end."""
        self._connection.close()


class Listener:
    """Where other members' links come in; it puts its name into the store, where ``Link.to`` waits for it."""

    def __init__(self, members: Members) -> None:
        self.members = members
        self._links: dict[int, Link] = {}
        name = f"mcore_rl/{secrets.token_hex(16)}".encode()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(b"\0" + name)
        self._socket.listen(members.address.num_members)
        self._socket.settimeout(LOOK_S)
        members.set(f"link/{members.member}", name)

    def link_from(self, peer: int) -> Link:
        """The link that ``peer`` made.  Raises PeerLostError if it is gone or silent, or any member failed."""
        until = time.monotonic() + self.members.address.timeout_s
        while peer not in self._links:
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                self.members.look_around([peer])
                if time.monotonic() > until:
                    title = self.members.address.title(peer)
                    limit = f"{self.members.address.timeout_s:g} s"
                    raise PeerLostError(peer, f"{title} timed out: nothing came for {limit}") from None
                continue
            if not _is_of_this_user(connection):
                connection.close()
                continue
            coming = Link(self.members, peer, connection)
            (who,) = WHO.unpack(coming.receive(WHO.size))
            coming.peer = who
            self._links[who] = coming
        return self._links[peer]

    def close(self) -> None:
        """Close the socket and all links."""
        self._socket.close()
        for link in self._links.values():
            link.close()


def _is_of_this_user(connection: socket.socket) -> bool:
    said = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return bool(CREDENTIALS.unpack(said)[1] == os.getuid())


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
        self.members = members
        self._memory = memory
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
        self._memory = memory
        self._listener = Listener(members)
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
