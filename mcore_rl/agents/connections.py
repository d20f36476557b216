"""The connections of the gateway: few may belong to nobody, and not for long.

Anybody on the machine can connect to the gateway, say half a request and wait; each connection takes one of the
controller's descriptors.  A connection is a stranger's until a request on it has shown a key that is open.

Invariant: strangers hold at most ``MAX_STRANGERS`` connections, each for at most ``STRANGER_S``, and one episode at
most ``MAX_OF_ONE``.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Hashable
from typing import Any

STRANGER_S = 10.0  # that a connection may take to show a key
# The oldest is closed for a new one.  More than the 100 connections that asyncio accepts at once, so that a program has
# its turn to be read before strangers can push it out.
MAX_STRANGERS = 256
MAX_OF_ONE = 256  # connections that one key may have


class Connections:
    """Knows each connection's owners: whoever has shown a key on it."""

    def __init__(self) -> None:
        self._strangers: dict[asyncio.Transport, asyncio.TimerHandle] = {}  # the oldest first
        self._owners: dict[asyncio.Transport, set[Hashable]] = {}
        self._of: defaultdict[Hashable, set[asyncio.Transport]] = defaultdict(set)

    def came(self, transport: asyncio.Transport) -> None:
        """Takes a new connection, or one that lost its last owner, as a stranger's."""
        self._strangers[transport] = asyncio.get_running_loop().call_later(STRANGER_S, transport.abort)
        if len(self._strangers) > MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            self._strangers.pop(oldest).cancel()
            oldest.abort()

    def know(self, transport: asyncio.Transport | None, owner: Hashable) -> bool:
        """Notes that ``owner`` has shown its key on a connection.  False: it has too many."""
        if transport is None or transport.is_closing():
            return True
        if transport not in self._of[owner] and len(self._of[owner]) >= MAX_OF_ONE:
            return False
        if (timer := self._strangers.pop(transport, None)) is not None:
            timer.cancel()
        self._owners.setdefault(transport, set()).add(owner)
        self._of[owner].add(transport)
        return True

    def forget(self, owner: Hashable) -> None:
        """Ends what ``owner`` has: its key is no longer good."""
        for transport in self._of.pop(owner, ()):
            owners = self._owners[transport]
            owners.discard(owner)
            if not owners:
                del self._owners[transport]
                self.came(transport)

    def went(self, transport: asyncio.Transport) -> None:
        """Forgets a connection that is closed."""
        if (timer := self._strangers.pop(transport, None)) is not None:
            timer.cancel()
        for owner in self._owners.pop(transport, ()):
            self._of[owner].discard(transport)

    @property
    def count(self) -> int:
        """Connections that are open."""
        return len(self._strangers) + len(self._owners)


class Watched(asyncio.Protocol):
    """Tells ``connections`` of one connection, which ``served``, the server's protocol, serves."""

    def __init__(self, connections: Connections, served: Any) -> None:
        self._connections = connections
        self._served = served
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See ``asyncio.Protocol``."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._connections.came(transport)
        self._served.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """See ``asyncio.Protocol``."""
        assert self._transport is not None
        self._connections.went(self._transport)
        self._served.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See ``asyncio.Protocol``."""
        self._served.data_received(data)

    def eof_received(self) -> bool | None:
        """See ``asyncio.Protocol``."""
        ends: bool | None = self._served.eof_received()
        return ends

    def pause_writing(self) -> None:
        """See ``asyncio.Protocol``."""
        self._served.pause_writing()

    def resume_writing(self) -> None:
        """See ``asyncio.Protocol``."""
        self._served.resume_writing()
