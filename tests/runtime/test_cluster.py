"""Ray is started with what was asked for, and stopped by whoever started it."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
from pathlib import Path

import pytest
import ray

from mcore_rl.config.trainer import RayInitConfig
from mcore_rl.errors import ConfigError
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
