"""Ray is started with what was asked for, and stopped by whoever started it."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path

import pytest
import ray

from mcore_rl.config.trainer import RayInitConfig
from mcore_rl.errors import ConfigError
from mcore_rl.runtime.cluster import ray_cluster, this_host


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
