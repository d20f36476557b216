"""The store does what torch's does, for those who know its secret; others get nothing, and nobody waits for them."""

from __future__ import annotations

import os
import pickle
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import msgspec
import psutil
import pytest
import torch.distributed as dist
from torch.distributed import HashStore, Store

from mcore_rl.parallel import secret_store as module
from mcore_rl.parallel.launch import HOST
from mcore_rl.parallel.secret_store import (
    HELLO,
    LENGTH,
    MAC_BYTES,
    MAX_BYTES,
    MAX_STRANGERS,
    NONCE_BYTES,
    REFUSED,
    Prefixed,
    SecretStore,
    StoreAccess,
    StoreCall,
    StoreRefusedError,
    StoreServer,
)
from tests.support.outsider import as_another_user


@pytest.fixture
def server() -> Iterator[StoreServer]:
    with StoreServer(HOST) as made:
        yield made


@pytest.fixture
def client(server: StoreServer) -> Iterator[SecretStore]:
    made = SecretStore(server.access, 60.0)
    yield made
    made.close()


def works(server: StoreServer) -> bool:
    """Whether a member still gets what another one sets."""
    one, other = SecretStore(server.access, 60.0), SecretStore(server.access, 60.0)
    one.set("for a member", b"\x00\xff")
    same = other.get("for a member") == b"\x00\xff"
    one.close()
    other.close()
    return same


# ---- the same as torch's ----


def test_each_call_answers_as_torch_s_own_store(client: SecretStore) -> None:
    torch_s = HashStore()

    def outcomes(store: Store) -> list[object]:
        store.set("a", "text")
        store.multi_set(["b", "c"], ["1", "2"])
        return [
            store.get("a"), store.check(["a", "b"]), store.check(["a", "nothing"]), store.multi_get(["b", "c"]),
            store.add("n", 5), store.add("n", -2), store.get("n"), store.delete_key("c"), store.delete_key("c"),
            store.compare_set("a", "other", "new"), store.compare_set("a", "text", "new"), store.get("a"),
            store.compare_set("fresh", "", "x"), store.compare_set("absent", "y", "z"), store.check(["absent"]),
            store.append("a", "er"), store.get("a"), store.num_keys(), store.has_extended_api(),
        ]  # fmt: skip

    assert outcomes(client) == outcomes(torch_s)
    assert outcomes(Prefixed("below", client))[:-2] == outcomes(HashStore())[:-2], "torch's C++ calls it"
    assert client.get("below/n") == b"3"


def test_a_wait_ends_with_the_last_key_or_its_time(server: StoreServer, client: SecretStore) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.wait, ["x", "y"], timedelta(seconds=60))
        other = SecretStore(server.access)
        other.set("x", "1")
        time.sleep(2 * module.SLICE_S)
        assert not waiting.done() and client.add("while another thread waits", 1) == 1
        other.set("y", "2")
        waiting.result(30)
    with pytest.raises(dist.DistStoreError, match=r"timed out: nobody set never within 0\.1 s"):
        Prefixed("", client).store.wait(["never"], timedelta(seconds=0.1))
    assert client.clone() is client


def test_many_threads_of_many_clients_count_right(server: StoreServer) -> None:
    clients = [SecretStore(server.access) for _ in range(4)]
    with ThreadPoolExecutor(16) as pool:
        sums = list(pool.map(lambda number: clients[number % 4].add("count", 1), range(400)))
    assert sorted(sums) == list(range(1, 401))


def test_a_server_that_is_gone_is_said_at_once(server: StoreServer, client: SecretStore) -> None:
    server.close()
    with pytest.raises(ConnectionError):
        client.get("x")
    with pytest.raises(ConnectionError, match=f"no store of this run answers at {HOST}:{server.access.port}"):
        SecretStore(server.access, 0.1)


# ---- who may connect ----


def test_it_listens_at_one_address() -> None:
    with StoreServer("127.0.0.2") as server:
        assert works(server)
        mine = psutil.Process().net_connections("inet")
        assert {each.laddr.ip for each in mine if each.laddr.port == server.access.port} == {"127.0.0.2"}
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HOST, server.access.port), 5.0)
    for everywhere in module.EVERYWHERE:
        with pytest.raises(AssertionError, match="one address"):
            StoreServer(everywhere)


def test_a_wrong_secret_is_refused_and_said(server: StoreServer) -> None:
    with pytest.raises(StoreRefusedError, match="has another secret"):
        SecretStore(replace(server.access, secret=b"guessed"), 60.0)
    assert works(server)


def test_a_member_tells_a_false_store_nothing() -> None:
    """One that listens where the store was, and answers without the secret."""
    heard = bytearray()
    with socket.create_server((HOST, 0)) as listener:

        def pretend() -> None:
            connection, _ = listener.accept()
            connection.sendall(HELLO + bytes(NONCE_BYTES))
            while len(heard) < NONCE_BYTES + MAC_BYTES:
                heard.extend(connection.recv(4096))
            connection.sendall(os.urandom(MAC_BYTES))
            while more := connection.recv(4096):
                heard.extend(more)

        false = threading.Thread(target=pretend)
        false.start()
        access = StoreAccess(host=HOST, port=listener.getsockname()[1], secret=b"the run's")
        with pytest.raises(StoreRefusedError):
            SecretStore(access, 60.0)
        false.join(30)
    assert len(heard) == NONCE_BYTES + MAC_BYTES, "a nonce and a proof, and no call"


STRANGER = """
host, port, said = sys.argv[1], int(sys.argv[2]), bytes.fromhex(sys.argv[3])
connection = socket.create_connection((host, port), 60)
connection.sendall(said)
connection.shutdown(socket.SHUT_WR)
connection.settimeout(60)
heard = b""
try:
    while more := connection.recv(4096):
        heard += more
except ConnectionResetError:
    pass
print(heard.hex())
"""
LOOK = """
for kind in ("environ", "mem", "maps"):
    try:
        open(f"/proc/{sys.argv[1]}/{kind}", "rb").read(1)
        print(kind)
    except OSError:
        pass
"""
EVIL = pickle.dumps((os.system, ("touch /tmp/evil",)))


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        bytes(NONCE_BYTES),
        bytes(NONCE_BYTES + MAC_BYTES),
        bytes(NONCE_BYTES + MAC_BYTES) + LENGTH.pack(MAX_BYTES + 1) + bytes(1000),
        bytes([0, 3]) + b"\x00\x00\x00\x00" * 20,  # as torch's TCPStore begins: a check of the protocol, and more
        EVIL * 10,
    ],
    ids=["nothing", "http", "half", "a false proof", "a false proof and a call", "torch", "a pickle"],
)
def test_another_user_of_the_machine_hears_nothing(server: StoreServer, client: SecretStore, said: bytes) -> None:
    client.set("a secret of the run", "weights")
    heard = bytes.fromhex(as_another_user(STRANGER, server.access.host, server.access.port, said.hex()))
    assert heard[: len(HELLO)] in (HELLO, b"") and len(heard) <= len(HELLO) + NONCE_BYTES + MAC_BYTES
    assert heard[len(HELLO) + NONCE_BYTES :] in (b"", REFUSED)
    assert client.num_keys() == 1 and works(server)


def test_another_user_cannot_find_the_secret_of_this_process(server: StoreServer) -> None:
    assert "secret" not in repr(server.access)
    assert server.access.secret not in Path("/proc/self/cmdline").read_bytes()
    assert as_another_user(LOOK, os.getpid()) == ""


def conversation(access: StoreAccess) -> tuple[socket.socket, module._Seal]:
    """A connection past the handshake, and the client's seal, for one who knows the secret."""
    connection = socket.create_connection((access.host, access.port), 30)
    hello = connection.recv(1000)
    nonces = hello[len(HELLO) :] + bytes(NONCE_BYTES)
    connection.sendall(bytes(NONCE_BYTES) + module._mac(access.secret, b"client", nonces))
    assert connection.recv(MAC_BYTES) == module._mac(access.secret, b"server", nonces)
    return connection, module._Seal(access.secret, b"client", nonces)


@pytest.mark.parametrize("what", ["changed", "repeated", "of another connection", "no request", "too long"])
def test_a_message_on_the_way_cannot_be_changed(server: StoreServer, client: SecretStore, what: str) -> None:
    """By one who can write into a connection, as some networks let him."""
    connection, seal = conversation(server.access)
    message = bytearray(seal.closed(StoreCall("add", ["n"], [], 1)))
    if what == "of another connection":
        _, other = conversation(server.access)
        message = bytearray(other.closed(StoreCall("add", ["n"], [], 1)))
    if what == "changed":
        message[len(message) // 2] ^= 1
    if what == "no request":
        fake = module._Seal.closed(conversation(server.access)[1], module.StoreReply([b"x"], 3))
        message = bytearray(fake)
    if what == "too long":
        message[: LENGTH.size] = LENGTH.pack(MAX_BYTES + 1)
    connection.sendall(message)
    if what == "repeated":
        assert connection.recv(4096)
        connection.sendall(message)
    assert connection.recv(4096) == b"", "the connection is closed"
    assert client.add("n", 0) == (1 if what == "repeated" else 0)


def test_strangers_who_stay_keep_nobody_out(
    server: StoreServer, client: SecretStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More connections than are let wait, which say nothing."""
    monkeypatch.setattr(module, "HANDSHAKE_S", 1e9)
    silent = [socket.create_connection((HOST, server.access.port), 30) for _ in range(MAX_STRANGERS + 20)]
    assert client.add("x", 1) == 1 and works(server)
    with suppress(ConnectionResetError):
        while silent[0].recv(4096):  # the oldest is sent away, and no other before it
            continue
    assert len(server._strangers) <= MAX_STRANGERS
    for each in silent:
        each.close()


def test_a_stranger_who_says_nothing_is_sent_away(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HANDSHAKE_S", 0.1)
    with socket.create_connection((HOST, server.access.port), 60) as silent:
        heard = b""
        while more := silent.recv(4096):
            heard += more
    assert len(heard) == len(HELLO) + NONCE_BYTES


def test_a_member_s_malformed_call_ends_its_own_connection(server: StoreServer, client: SecretStore) -> None:
    """Not only strangers err: another version of this package, for one."""
    bad = SecretStore(server.access, 60.0)
    for request in (StoreCall("add", []), StoreCall("set", ["a", "b"], [b"only one"]), StoreCall("swap", ["a"], [])):
        bad = SecretStore(server.access, 60.0)
        with pytest.raises(ConnectionError):
            bad._ask(request)
    client.set("text", "no number")
    with pytest.raises(ConnectionError):
        SecretStore(server.access, 60.0).add("text", 1)
    assert works(server)


def test_what_is_sent_is_typed() -> None:
    for wrong in ([1], ["exec", ["x"]], ["set", "x"], ["set", ["x"], [3]], ["add", ["x"], [], "1"]):
        with pytest.raises(msgspec.MsgspecError):
            msgspec.msgpack.decode(msgspec.msgpack.encode(wrong), type=StoreCall)
