"""Ray is started with what was asked for, and stopped by whoever started it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import pytest
import ray

from mcore_rl.config.trainer import RayInitConfig
from mcore_rl.ground.errors import ConfigError, WorkerError
from mcore_rl.runtime import cluster
from mcore_rl.runtime.cluster import ray_cluster, this_host
from tests.support.outsider import as_another_user

JOIN = """
try:
    print(open(sys.argv[2]).read())
except PermissionError:
    print("no token", flush=True)
try:
    ray._raylet.GcsClient(address=sys.argv[1]).internal_kv_keys(b"", namespace=None)
    print("joined", flush=True)
except Exception:
    print("refused", flush=True)
os._exit(0)
"""


def nothing() -> None: ...


def test_a_ray_that_does_not_start_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: None
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / ("x" * 100)))  # no socket has so long a path
    message = r"^Ray did not start: .*107 bytes.*a short path, Ray's logs stay"
    with pytest.raises(WorkerError, match=message) as error, ray_cluster(RayInitConfig(num_cpus=1)):
        pass
    assert "\n" not in str(error.value)


def test_a_cluster_of_our_own_ends_with_the_block_and_leaves_its_timeline(tmp_path: Path, processes: None) -> None:
    timeline, on_sigterm = tmp_path / "deep" / "timeline.json", signal.getsignal(signal.SIGTERM)
    with ray_cluster(RayInitConfig(num_cpus=3, timeline_json_file=str(timeline))):
        assert ray.cluster_resources()["CPU"] == 3
        assert this_host().count(".") == 3
        assert signal.getsignal(signal.SIGTERM) is on_sigterm
        assert ray.get(ray.remote(nothing).remote()) is None
        with ray_cluster(RayInitConfig(num_cpus=5)):  # where one is there already, it is used
            assert ray.cluster_resources()["CPU"] == 3
        assert ray.is_initialized(), "and stays"
        token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
        assert [stat.S_IMODE(path.stat().st_mode) for path in (token, token.parent)] == [0o600, 0o700]
        if os.getuid() == 0:
            address = ray.get_runtime_context().gcs_address
            told = as_another_user(
                JOIN, address, token, imports="import ray", unset=["RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"]
            )
            assert told == "no token\nrefused\n"
    assert not token.parent.exists() and "RAY_AUTH_TOKEN_PATH" not in os.environ
    assert not ray.is_initialized()
    assert isinstance(json.loads(timeline.read_text()), list)


def test_a_cluster_that_does_not_answer_is_refused_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        refusal = pytest.raises(ConfigError, match=f"ray_init.address={address}: no Ray cluster answers there")
        with refusal, ray_cluster(RayInitConfig(address=address)):
            pass
    assert not ray.is_initialized()


@contextmanager
def answering(answer: bytes | None) -> Iterator[str]:
    """The address of a server that says ``answer`` to whoever comes; None: it accepts, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    with connection:
                        connection.recv(100)
                        connection.sendall(answer or b"")

        if answer is not None:
            threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "something else listens there, which speaks no gRPC"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "something else listens there, which speaks no gRPC"),
        (b"\x00", "something else listens there, which speaks no gRPC"),
        (None, "something listens and says nothing for 1 s"),
    ],
)
def test_what_is_no_ray_is_refused(answer: bytes | None, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if answer is None:
        assert cluster.KNOCK_S < 10
        monkeypatch.setattr(cluster, "KNOCK_S", 1.0)
    monkeypatch.setattr(ray, "init", lambda *_, **__: pytest.fail("Ray would try for minutes"))
    with answering(answer) as address:
        said = re.escape(f"ray_init.address={address}: no Ray cluster answers there: {why}. Start one with")
        with pytest.raises(ConfigError, match=said), ray_cluster(RayInitConfig(address=address)):
            pass


def test_a_server_of_grpc_that_is_no_ray_is_refused(monkeypatch: pytest.MonkeyPatch, processes: None) -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    monkeypatch.setattr(ray, "init", lambda *_, **__: pytest.fail("Ray would try for minutes"))
    try:
        said = r"a server of gRPC that is no head of Ray's \(ray.exceptions.RpcError: RPC error: Method not found!\)"
        with pytest.raises(ConfigError, match=said), ray_cluster(RayInitConfig(address=address)):
            pass
    finally:
        server.stop(0)
