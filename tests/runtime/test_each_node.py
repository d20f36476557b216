"""A function runs once on every node of a Ray that is there; who fails or gives no answer is named."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import ray
from ray.cluster_utils import Cluster

from mcore_rl.config.engine import Device
from mcore_rl.ground.errors import ConfigError, WorkerError
from mcore_rl.parallel.device import detect
from mcore_rl.parallel.secret_store import SecretStore, StoreAccess
from mcore_rl.runtime import each_node
from mcore_rl.runtime.each_node import on_each_node

CPU = detect(Device.cpu)
pytestmark = pytest.mark.tier("full")


@pytest.fixture(scope="module")
def address(processes: None) -> Iterator[str]:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "node_name": "n1"})
    cluster.add_node(num_cpus=1, node_name="n2")
    yield cluster.address
    cluster.shutdown()


def where(node: int, num_nodes: int, word: str, store: StoreAccess, limit_s: float) -> tuple[object, ...]:
    SecretStore(store).add("nodes", 1)
    return node, num_nodes, word, limit_s, ray.get_runtime_context().get_node_id(), os.getpid()


def fails(node: int, num_nodes: int, limit_s: float) -> None:
    if node == 1:
        raise WorkerError("rank 3 failed in all-reduce")


def hangs(node: int, num_nodes: int, limit_s: float) -> None:
    time.sleep(600 if node == 1 else 0)


def test_every_node_answers_once_from_its_own_process(address: str) -> None:
    answers = on_each_node(where, address, 2, CPU, ("word",), 60.0, with_store=True)
    whole = {name: answer for name, answer in answers.items() if not isinstance(answer, WorkerError)}
    assert {name: answer[:4] for name, answer in whole.items()} == {
        "n1": (0, 2, "word", 60.0),
        "n2": (1, 2, "word", 60.0),
    }
    assert len({answer[4] for answer in whole.values()}) == len({answer[5] for answer in whole.values()}) == 2
    assert not ray.is_initialized(), "the cluster is left as it was"


def test_a_node_that_fails_is_named(address: str) -> None:
    answers = on_each_node(fails, address, 2, CPU, (), 60.0)
    assert answers["n1"] is None, "the others have answered"
    assert isinstance(answers["n2"], WorkerError)
    assert str(answers["n2"]).startswith("n2: ") and "rank 3 failed in all-reduce" in str(answers["n2"])


def test_a_node_that_gives_no_answer_is_named(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(each_node, "ANSWER_S", 2.0)
    answers = on_each_node(hangs, address, 2, CPU, (), 3.0)
    assert str(answers["n2"]) == "n2 gave no answer within 5 s"


def test_more_nodes_than_there_are(address: str) -> None:
    with pytest.raises(ConfigError, match=r"--nodes=3: the Ray cluster at .* has 2 nodes"):
        on_each_node(fails, address, 3, CPU, (), 60.0)
