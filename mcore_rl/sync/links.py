"""Short messages between two processes of one host, and notice of the other's end: a Unix socket for each pair.

The store through which all members meet is one process for the whole run: hundreds of ranks that told one another there
of every message would wait for it.  A socket also says at once when the other process is gone.

The name of a socket is in no file system, and random; only a process of the same user is answered.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from mcore_rl.sync.members import LOOK_S, Members, PeerLostError

T = TypeVar("T")
CREDENTIALS = struct.Struct("3i")  # of SO_PEERCRED: process, user, group
WHO = struct.Struct("<I")  # the first that is said on a link: the member


class Link:
    """A connection with member ``peer``."""

    def __init__(self, members: Members, peer: int, connection: socket.socket) -> None:
        self.members, self.peer, self._connection = members, peer, connection
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
                    title, limit = self.members.address.title(peer), f"{self.members.address.timeout_s:g} s"
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
