"""Models that a node does not see are named before anything is started."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import ray

from mcore_rl.ground.errors import ConfigError
from mcore_rl.runtime import seen_paths

COMMIT = "0" * 40


def test_what_is_said() -> None:
    cached = f"/cache/hub/models--a--b/snapshots/{COMMIT}"
    paths = {"model.path": cached, "critic.path": "/models/critic", "reference.path": "/models/reference"}
    blind = {"n2": ["model.path"], "n1": ["model.path", "critic.path"], "n3": []}
    model, critic = map(str, seen_paths.unseen_violations(paths, blind))
    assert model.startswith(f"model.path=a/b@{COMMIT}: was downloaded to {cached}, which is not seen by n1, n2.")
    assert "set HF_HOME" in model
    assert critic.startswith("critic.path=/models/critic: is not seen by n1.") and "HF_HOME" not in critic


def test_a_path_is_looked_for_on_a_machine(tmp_path: Path) -> None:
    assert seen_paths.unseen({"a": str(tmp_path), "b": str(tmp_path / "none")}) == ["b"]


def test_the_other_nodes_are_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, processes: None) -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, log_to_driver=False)
        nodes = {each["NodeID"] for each in ray.nodes()}
        assert len(nodes) == 2
        asyncio.run(seen_paths.demand_seen({"model.path": tmp_path}, nodes))
        with pytest.raises(ConfigError, match="is not seen by"):
            asyncio.run(seen_paths.demand_seen({"model.path": tmp_path / "none"}, nodes))
        here = {ray.get_runtime_context().get_node_id()}
        asyncio.run(seen_paths.demand_seen({"model.path": tmp_path / "none"}, here))
    finally:
        ray.shutdown()
        cluster.shutdown()
