"""Several nodes without accelerators: the trainer's processes stand where ``trainer.nnodes`` says."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util import placement_group_table

from mcore_rl.config.engine import Device
from mcore_rl.config.rollout import RolloutLayout
from mcore_rl.config.trainer import Placement, TrainerConfig
from mcore_rl.ground.errors import ConfigError
from mcore_rl.parallel.device import detect
from mcore_rl.runtime.placement import Bundle, place
from mcore_rl.weights.sites import Sites

CPU = detect(Device.cpu)


@pytest.fixture(scope="module")
def three_nodes(processes: None) -> Iterator[None]:
    """Of two cores, three, and two."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    cluster.add_node(num_cpus=3)
    cluster.add_node(num_cpus=2)
    ray.init(address=cluster.address, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
    cluster.shutdown()


def node_of(bundle: Bundle) -> str:
    return str(placement_group_table(bundle.group)["bundles_to_node_id"][bundle.index])


def test_every_node_gets_its_share_of_the_ranks(three_nodes: None) -> None:
    places = asyncio.run(place(TrainerConfig(nnodes=3, n_gpus_per_node=2), RolloutLayout(dp=3), CPU))
    nodes = [node_of(bundle) for bundle in places.train]
    assert nodes[0::2] == nodes[1::2] and len(set(nodes)) == 3, "ranks of a node are neighbours"
    assert [node_of(bundle) for (bundle,) in places.rollout] == nodes[:3]
    places.close()


def test_an_engine_with_more_ranks_than_a_node_has_processes_is_on_several(three_nodes: None) -> None:
    layout = RolloutLayout(tp=2)
    places = asyncio.run(place(TrainerConfig(nnodes=2, n_gpus_per_node=1), layout, CPU))
    ((first, second),) = places.rollout
    assert [node_of(first), node_of(second)] == [node_of(bundle) for bundle in places.train]
    assert places.sites(layout, Placement.colocated) == Sites((0, 1), (0, 1), (0, 1))
    places.close()
    places = asyncio.run(place(TrainerConfig(nnodes=2, n_gpus_per_node=2), RolloutLayout(tp=4), CPU))
    assert places.sites(RolloutLayout(tp=4), Placement.colocated) == Sites((0, 0, 1, 1), (0, 0, 1, 1), (0, 1, 2, 3))
    places.close()
    with pytest.raises(ConfigError, match=r"rollout\.tp=3: an engine of 3 devices neither divides"):
        asyncio.run(place(TrainerConfig(nnodes=2, n_gpus_per_node=2), RolloutLayout(tp=3), CPU))


def test_fewer_nodes_than_there_are_and_more(three_nodes: None) -> None:
    places = asyncio.run(place(TrainerConfig(nnodes=2, n_gpus_per_node=1), RolloutLayout(), CPU))
    assert len({node_of(bundle) for bundle in places.train}) == 2
    places.close()
    places = asyncio.run(place(TrainerConfig(nnodes=4, n_gpus_per_node=1), RolloutLayout(), CPU))
    assert len(places.train) == 4, "all stand somewhere"
    places.close()
