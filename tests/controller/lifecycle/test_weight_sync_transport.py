"""Which way weights take, for every placement, world and platform: gloo never gets memory of an accelerator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mcore_rl.config.engine import Device
from mcore_rl.config.rollout import RolloutConfig, RolloutLayout
from mcore_rl.config.run import RunConfig
from mcore_rl.config.trainer import Placement, TrainerConfig
from mcore_rl.controller.lifecycle.weight_sync import weight_transport
from mcore_rl.parallel.device import Platform, detect
from mcore_rl.parallel.secret_store import StoreAccess
from mcore_rl.runtime import placement as placing
from mcore_rl.runtime.placement import Bundle, Places
from mcore_rl.sync.routed import RoutedTransport
from mcore_rl.sync.shared_memory import SharedMemoryTransport
from mcore_rl.sync.transport import Transport
from mcore_rl.weights.sites import Sites

CPU = detect(Device.cpu)
STORE = StoreAccess(host="10.0.0.1", port=1234, secret=b"")
ACCELERATORS = {
    name: replace(CPU, kind=kind, device_type="cuda", backend="nccl", num_devices=8)
    for name, kind in (("nvidia", Device.cuda), ("amd", Device.rocm))
}


def bundle(node: str) -> Bundle:
    group: Any = node
    return Bundle(group, 0)


@pytest.fixture(autouse=True)
def nodes_of_bundles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "_node_of", lambda each: each.group)


def transport(
    platform: Platform, placement: Placement, nnodes: int, per_node: int, layout: RolloutLayout, engine_nodes: list[str]
) -> Transport:
    """engine_nodes: of each engine, the names of its nodes, with a comma between them."""
    trainer = TrainerConfig(nnodes=nnodes, n_gpus_per_node=per_node, placement=placement)
    rollout = RolloutConfig(tp=layout.tp, dp=layout.dp)
    train = tuple(bundle(f"node {rank // per_node}") for rank in range(trainer.world_size))
    engines = tuple(tuple(map(bundle, names.split(", "))) for names in engine_nodes)
    places = Places(train, engines, 0.25 if platform.is_accelerator else 0.0, ())
    return weight_transport(RunConfig(trainer=trainer, rollout=rollout), platform, places, STORE)


@pytest.mark.parametrize("vendor", list(ACCELERATORS))
@pytest.mark.parametrize(
    ("nnodes", "per_node", "layout"),
    [
        (1, 1, RolloutLayout()),
        (1, 8, RolloutLayout(tp=4, dp=2)),
        (1, 8, RolloutLayout(tp=2, dp=2)),  # half of the devices have no engine
        (2, 8, RolloutLayout(tp=8, dp=2)),
        (16, 8, RolloutLayout(tp=8, dp=16)),
    ],
    ids=str,
)
def test_colocated_engines_get_them_from_the_rank_on_their_device(
    vendor: str, nnodes: int, per_node: int, layout: RolloutLayout
) -> None:
    engines = [f"node {engine * layout.tp // per_node}" for engine in range(layout.dp)]
    made = transport(ACCELERATORS[vendor], Placement.colocated, nnodes, per_node, layout, engines)
    assert isinstance(made, RoutedTransport) and made.platform.backend == "nccl"
    assert made.sites == Sites.colocated([rank // per_node for rank in range(nnodes * per_node)], layout.world_size)
    assert made.sites.members == nnodes * per_node, "one communicator, of the training ranks"


@pytest.mark.parametrize("vendor", list(ACCELERATORS))
def test_separate_engines_are_in_one_group_with_the_trainer(vendor: str) -> None:
    layout = RolloutLayout(tp=4, dp=3)
    made = transport(ACCELERATORS[vendor], Placement.separate, 1, 8, layout, ["node 0", "far", "far"])
    assert isinstance(made, RoutedTransport) and made.platform.backend == "nccl"
    assert made.sites == Sites((0,) * 8, (0,) * 4 + (1,) * 8)
    assert made.sites.members == 20


@pytest.mark.parametrize("vendor", list(ACCELERATORS))
def test_the_ranks_of_an_engine_on_several_nodes_are_where_its_parts_are(vendor: str) -> None:
    layout = RolloutLayout(tp=16, dp=2)
    made = transport(ACCELERATORS[vendor], Placement.colocated, 4, 8, layout, ["node 0, node 1", "node 2, node 3"])
    nodes = (0,) * 8 + (1,) * 8 + (2,) * 8 + (3,) * 8
    assert made.sites == Sites(nodes, nodes, tuple(range(32))), "handed over on the devices of the ranks' own nodes"
    made = transport(ACCELERATORS[vendor], Placement.separate, 1, 8, RolloutLayout(tp=16), ["near, far"])
    assert made.sites == Sites((0,) * 8, (1,) * 8 + (2,) * 8)


def test_on_the_cpu_a_process_of_each_node_receives_for_the_ranks_there() -> None:
    made = transport(CPU, Placement.colocated, 2, 2, RolloutLayout(tp=4), ["node 1, node 0"])
    assert made.sites == Sites((0, 0, 1, 1), (1, 1, 0, 0), (2, 3, 0, 1))


@pytest.mark.parametrize("placement", list(Placement))
@pytest.mark.parametrize("per_node", [1, 4])
def test_on_one_cpu_host_they_share_memory(placement: Placement, per_node: int) -> None:
    made = transport(CPU, placement, 1, per_node, RolloutLayout(tp=2, dp=2), ["node 0", "node 0"])
    assert isinstance(made, SharedMemoryTransport) and made.sites is None


def test_on_cpu_nodes_the_ranks_of_a_node_receive_in_turn() -> None:
    made = transport(CPU, Placement.colocated, 2, 2, RolloutLayout(tp=2, dp=2), ["node 1", "node 0"])
    assert isinstance(made, RoutedTransport) and made.platform.backend == "gloo"
    assert made.sites.rollout == (1, 1, 0, 0) and sorted(made.sites.hosts) == [0, 1, 2, 3]
    apart = transport(CPU, Placement.separate, 2, 2, RolloutLayout(tp=2, dp=2), ["node 1", "node 0"])
    assert isinstance(apart, RoutedTransport) and apart.sites.hosts == ()


def test_what_is_said_of_members_is_that_of_the_run() -> None:
    made = transport(CPU, Placement.colocated, 2, 2, RolloutLayout(tp=2), ["node 0"])
    assert (made.address.num_trainers, made.address.num_rollout) == (4, 2)
    assert made.address.store == STORE
