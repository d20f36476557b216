"""The key-value store at which the processes of a run meet: it answers only those who know the run's secret.

torch's ``TCPStore`` listens on every address and answers anyone, who may then send ranks to listeners of his own, read
what lies there, or delete what others wait for.  This one has the same methods, so ``init_process_group`` takes it.

Why a store of our own, and not Ray's channel: vLLM's workers are no processes of Ray, and gloo and NCCL ask a torch
``Store``.  Why TCP also on one machine: the way is the same on a cluster, and a handshake is as good as a Unix socket's
credentials.  It hides nothing: what goes over the network can be read there, but neither forged nor repeated.

Wire: the server sends a nonce; the client a nonce and ``HMAC(secret, "client", both)``; the server ``HMAC(secret,
"server", both)``.  Every message after that has its length and ends with an HMAC, under a key of this connection and
direction, over its number and itself.  Messages are msgpack of ``StoreCall`` and ``StoreReply``; a value is bytes
that nobody unpickles.

Invariant: a connection that says anything else is closed, and nobody else notices.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

import msgspec
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public, but not declared so

HELLO = b"mcore_rl store 1"
NONCE_BYTES = MAC_BYTES = 32
REFUSED = bytes(MAC_BYTES)  # what a server answers who does not know the secret
HANDSHAKE_S = 10.0  # how long a stranger may take
MAX_STRANGERS = 64  # at a time; the oldest is closed for a new one, and a client asks again
MAX_BYTES = 1 << 26  # of a message
SLICE_S = 0.5  # a client waits in slices, between which its other threads are served
LENGTH = struct.Struct("<I")
NUMBER = struct.Struct("<Q")
EVERYWHERE = ("", "0.0.0.0", "::")


@dataclass(frozen=True, kw_only=True)
class StoreAccess:
    """Where a ``SecretStore`` listens, and its secret, which no message shows."""

    host: str
    port: int
    secret: bytes = field(repr=False)


class StoreCall(msgspec.Struct, array_like=True):
    """One call.  keys, values: of ``verb``.  number: what ``add`` adds, or the milliseconds that ``get`` waits."""

    verb: Literal["set", "get", "has", "add", "delete", "swap", "append", "count"]
    keys: list[str] = []
    values: list[bytes] = []
    number: int = 0


class StoreReply(msgspec.Struct, array_like=True):
    """What the server answers: values, or a number."""

    values: list[bytes] = []
    number: int = 0


class StoreRefusedError(PermissionError):
    """The other end does not know this store's secret, or changed a message."""


def _mac(key: bytes, *parts: bytes) -> bytes:
    return hmac.new(key, b"".join(parts), hashlib.sha256).digest()


class _Seal:
    """Packs and opens the messages of one direction of one connection, in their order."""

    def __init__(self, secret: bytes, direction: bytes, nonces: bytes) -> None:
        self._key = _mac(secret, b"key of ", direction, nonces)
        self._number = 0

    def _mac_of(self, body: bytes) -> bytes:
        self._number += 1
        return _mac(self._key, NUMBER.pack(self._number), body)

    def closed(self, message: msgspec.Struct) -> bytes:
        body = msgspec.msgpack.encode(message)
        return LENGTH.pack(len(body)) + body + self._mac_of(body)

    def opened(self, sealed: bytes) -> bytes:
        body = sealed[:-MAC_BYTES]
        mac = sealed[-MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac_of(body)):
            raise StoreRefusedError("a message was forged, repeated or lost")
        return body


def _num_sealed(length: bytes) -> int:
    """Bytes of the message after ``length``, with its MAC."""
    (size,) = LENGTH.unpack(length)
    if size > MAX_BYTES:
        raise StoreRefusedError(f"a message of {size} bytes")
    return int(size) + MAC_BYTES


class StoreServer:
    """Keeps the values, in a thread of this process; a context manager, and ``close`` does the same."""

    def __init__(self, host: str) -> None:
        """Listen at ``host``, an address of this machine and never all of them, on a free port."""
        assert host not in EVERYWHERE, "a store listens at one address"
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=1024)
        self.access = StoreAccess(host=host, port=self._listener.getsockname()[1], secret=secrets.token_bytes(32))
        self._values: dict[str, bytes] = {}
        self._awaited: dict[str, list[asyncio.Future[None]]] = {}
        self._strangers: list[asyncio.StreamWriter] = []
        self._connections: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._thread.start()

    def __enter__(self) -> StoreServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Forget everything and close all connections."""
        with suppress(RuntimeError):  # closed already
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._accept, sock=self._listener))
        self._loop.run_forever()
        server.close()
        for connection in self._connections:
            connection.cancel()
        self._loop.run_until_complete(asyncio.gather(*self._connections, return_exceptions=True))
        self._loop.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self._serve(reader, writer)
        except Exception:  # noqa: BLE001  whatever a stranger says closes this connection, and no more than it
            pass
        except asyncio.CancelledError:  # by ``close``: the task's end is regular
            pass
        finally:
            self._connections.discard(task)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._strangers.append(writer)
        if len(self._strangers) > MAX_STRANGERS:
            self._strangers.pop(0).transport.abort()
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                nonces = await self._know(reader, writer)
        finally:
            if writer in self._strangers:
                self._strangers.remove(writer)
        coming = _Seal(self.access.secret, b"client", nonces)
        going = _Seal(self.access.secret, b"server", nonces)
        while True:
            sealed = await reader.readexactly(_num_sealed(await reader.readexactly(LENGTH.size)))
            request = msgspec.msgpack.decode(coming.opened(sealed), type=StoreCall)
            writer.write(going.closed(await self._answer(request)))
            await writer.drain()

    async def _know(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        """The nonces of both ends, once the other end has proven that it knows the secret."""
        own = secrets.token_bytes(NONCE_BYTES)
        writer.write(HELLO + own)
        theirs = await reader.readexactly(NONCE_BYTES)
        nonces = own + theirs
        proof = await reader.readexactly(MAC_BYTES)
        if not hmac.compare_digest(proof, _mac(self.access.secret, b"client", nonces)):
            writer.write(REFUSED)
            await writer.drain()
            raise StoreRefusedError("a wrong secret")
        writer.write(_mac(self.access.secret, b"server", nonces))
        return nonces

    async def _answer(self, request: StoreCall) -> StoreReply:
        keys = request.keys
        values = self._values
        match request.verb:
            case "set":
                for key, value in zip(keys, request.values, strict=True):
                    self._put(key, value)
            case "get":
                await self._wait(keys, request.number / 1000)
                if all(key in values for key in keys):
                    return StoreReply([values[key] for key in keys], 1)
            case "has":
                return StoreReply([], int(all(key in values for key in keys)))
            case "add":
                total = int(values.get(keys[0], b"0")) + request.number
                self._put(keys[0], str(total).encode())
                return StoreReply([], total)
            case "delete":
                return StoreReply([], int(values.pop(keys[0], None) is not None))
            case "swap":  # torch's rule: an absent value is set where an empty one was expected
                expected, wanted = request.values
                if values.get(keys[0], b"") == expected:
                    self._put(keys[0], wanted)
                return StoreReply([values.get(keys[0], expected)])
            case "append":
                self._put(keys[0], values.get(keys[0], b"") + request.values[0])
            case "count":
                return StoreReply([], len(values))
        return StoreReply()

    def _put(self, key: str, value: bytes) -> None:
        self._values[key] = value
        for waiting in self._awaited.pop(key, []):
            if not waiting.done():
                waiting.set_result(None)

    async def _wait(self, keys: Sequence[str], seconds: float) -> None:
        """Return when all ``keys`` are there, or after ``seconds``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while missing := next((key for key in keys if key not in self._values), None):
                    future: asyncio.Future[None] = self._loop.create_future()
                    waiting = self._awaited.setdefault(missing, [])
                    waiting.append(future)
                    try:
                        await future
                    finally:
                        if future in waiting:
                            waiting.remove(future)


class SecretStore(Store):
    """A client of a ``StoreServer``, with the methods of torch's ``Store``; any thread may call them.

    torch's groups keep the C++ half of a Python store only: whoever gives it to one keeps it as long as the group.

    Raises, where it cannot go on: ConnectionError if the server is gone, StoreRefusedError if the secrets differ, and
    torch's DistStoreError if a key does not come in time.
    """

    def __init__(self, access: StoreAccess, timeout_s: float = 60.0) -> None:
        """Connect.  timeout_s: for that, and for a key that somebody else is to set."""
        super().__init__()
        self.access = access
        self.timeout_s = timeout_s
        self._lock = threading.Lock()
        until = time.monotonic() + timeout_s
        while True:
            try:
                self._connect(max(1.0, until - time.monotonic()))
                return
            except StoreRefusedError:
                raise
            except OSError as error:  # not up yet, or full of strangers
                if time.monotonic() > until:
                    where = f"{access.host}:{access.port}"
                    raise ConnectionError(f"no store of this run answers at {where}: {error}") from error
            time.sleep(0.05)

    def _connect(self, timeout_s: float) -> None:
        self._socket = socket.create_connection((self.access.host, self.access.port), timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello = self._read(len(HELLO) + NONCE_BYTES)
        if not hello.startswith(HELLO):
            raise StoreRefusedError(f"{self.access.host}:{self.access.port} is no store of this version")
        own = secrets.token_bytes(NONCE_BYTES)
        nonces = hello[len(HELLO) :] + own
        self._socket.sendall(own + _mac(self.access.secret, b"client", nonces))
        if not hmac.compare_digest(self._read(MAC_BYTES), _mac(self.access.secret, b"server", nonces)):
            raise StoreRefusedError(f"the store at {self.access.host}:{self.access.port} has another secret")
        self._socket.settimeout(None)  # its answers come at once or within ``SLICE_S``; its end closes the connection
        self._going = _Seal(self.access.secret, b"client", nonces)
        self._coming = _Seal(self.access.secret, b"server", nonces)

    def _read(self, num_bytes: int) -> bytes:
        read = bytearray()
        while len(read) < num_bytes:
            more = self._socket.recv(num_bytes - len(read))
            if not more:
                raise ConnectionResetError("connection closed by peer: the store is gone")
            read += more
        return bytes(read)

    def _ask(self, request: StoreCall) -> StoreReply:
        with self._lock:
            self._socket.sendall(self._going.closed(request))
            sealed = self._read(_num_sealed(self._read(LENGTH.size)))
            return msgspec.msgpack.decode(self._coming.opened(sealed), type=StoreReply)

    def comes(self, keys: Sequence[str], seconds: float) -> bool:
        """Whether all ``keys`` are set within ``seconds``, at most ``SLICE_S``."""
        return bool(self._got(keys, seconds).number)

    def _got(self, keys: Sequence[str], seconds: float) -> StoreReply:
        return self._ask(StoreCall("get", list(keys), [], round(1000 * min(SLICE_S, max(0.0, seconds)))))

    def _await(self, keys: Sequence[str], timeout_s: float | None) -> list[bytes]:
        limit = self.timeout_s if timeout_s is None else timeout_s
        until = time.monotonic() + limit
        while True:
            reply = self._got(keys, until - time.monotonic())
            if reply.number:
                return reply.values
            if time.monotonic() >= until:
                raise dist.DistStoreError(f"timed out: nobody set {', '.join(keys)} within {limit:g} s")

    def set(self, key: str, value: str | bytes) -> None:
        """Set ``key`` to ``value``."""
        self.multi_set([key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set each of ``keys`` to its value."""
        self._ask(StoreCall("set", list(keys), [_bytes(value) for value in values]))

    def get(self, key: str) -> bytes:
        """The value of ``key``, as soon as somebody has set it."""
        return self._await([key], None)[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of ``keys``, as soon as all are set."""
        return self._await(keys, None)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return once all ``keys`` are set."""
        self._await(keys, None if timeout is None else timeout.total_seconds())

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all ``keys`` are set."""
        return bool(self._ask(StoreCall("has", list(keys))).number)

    def add(self, key: str, value: int) -> int:
        """Add to the number at ``key``, at first 0; returns the sum."""
        return self._ask(StoreCall("add", [key], [], value)).number

    def delete_key(self, key: str) -> bool:
        """Delete ``key``; whether it was there."""
        return bool(self._ask(StoreCall("delete", [key])).number)

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Set ``key`` if it is as expected; returns what it is then."""
        return self._ask(StoreCall("swap", [key], [_bytes(expected_value), _bytes(desired_value)])).values[0]

    def append(self, key: str, value: str | bytes) -> None:
        """Append ``value`` to what ``key`` has."""
        self._ask(StoreCall("append", [key], [_bytes(value)]))

    def num_keys(self) -> int:
        """The number of keys."""
        return self._ask(StoreCall("count")).number

    def has_extended_api(self) -> bool:
        """That there are ``append``, ``multi_get`` and ``multi_set``."""
        return True

    def clone(self) -> SecretStore:
        """This store: its calls are already one after the other, and no wait holds them up longer than ``SLICE_S``."""
        return self

    def close(self) -> None:
        """Leave; a call that waits ends with an error."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    # The names under which torch's C++ calls two of them (torch 2.13, c10d/init.cpp, PythonStore).
    deleteKey = delete_key
    getNumKeys = num_keys


class Prefixed(PrefixStore):
    """``store`` with ``prefix`` before every key; keeps the Python half of ``store``, as long as itself is kept."""

    def __init__(self, prefix: str, store: SecretStore) -> None:
        super().__init__(prefix, store)
        self.store = store


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
