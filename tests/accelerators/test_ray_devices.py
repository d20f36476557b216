"""Who sees which accelerator: a real Ray over nodes that say they have eight, our placement, our starts.

Ray counts devices without looking for them, and sets the masks of its workers as on a GPU node.  The processes are
small: each says what it was given.  What torch and vLLM make of masks is in tests/parallel/test_device_masks.py.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from mcore_rl.config.engine import Device
from mcore_rl.config.placement import engine_nodes
from mcore_rl.config.rollout import RolloutConfig, RolloutLayout
from mcore_rl.config.trainer import Placement, TrainerConfig
from mcore_rl.parallel.device import MASKS, detect, ray_environment
from mcore_rl.rollout.served import Served
from mcore_rl.rollout.vllm.engine.engine_node import EngineNode, Meeting
from mcore_rl.rollout.vllm.engine.environment import engine_environment
from mcore_rl.runtime import start
from mcore_rl.runtime.placement import place

CUDA = replace(detect(Device.cpu), kind=Device.cuda, device_type="cuda", backend="nccl", num_devices=8)
PER_NODE = 8
Physical = tuple[str, int]  # (node, the device's index on it)

pytestmark = pytest.mark.tier("full")


@pytest.fixture(scope="module")
def three_nodes(processes: None) -> Iterator[None]:
    """Of eight accelerators each, started from a shell in which Slurm has set masks."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ray_environment(Device.cuda, {}).items():
            patch.delenv(name, raising=False) if value is None else patch.setenv(name, value)
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": PER_NODE, "num_gpus": PER_NODE})
        for _ in range(2):
            cluster.add_node(num_cpus=PER_NODE, num_gpus=PER_NODE)
        ray.init(address=cluster.address, include_dashboard=False, log_to_driver=False)
        yield
        ray.shutdown()
        cluster.shutdown()


@dataclass
class Given:
    """What a process has: the node that it is on, its masks, and the devices that it was told (engines) or dealt.

    place: what an engine's process knows of its engine's nodes.
    """

    node: str
    masks: dict[str, str]
    ids: Sequence[str] | None
    place: EngineNode | None


def small_worker() -> type:
    """A class whose objects say what they were given; from a function, so that Ray sends its code."""
    names = tuple(MASKS)

    class SmallWorker:
        def __init__(self, *_: Any) -> None:
            self.told: Sequence[str] | None = None
            self.node: EngineNode | None = None

        def device_ids(self) -> list[str]:  # as TrainWorker.device_ids
            return [str(index) for index in ray.get_gpu_ids()]

        def start(self, served: Any, cores: Any, device_ids: Sequence[str] | None, log: Any, node: EngineNode) -> None:
            self.told, self.node = device_ids, node

        def address(self) -> str:
            return "10.0.0.1"

        def meeting(self) -> Meeting:
            return Meeting(host="10.0.0.1", port=1, rpc_port=2)

        async def perform(self, verb: str, *_: Any) -> None:
            assert verb == "watch"
            await asyncio.sleep(1000)

        def whereabouts(self) -> None:
            """Where its processes are, which nobody asks after here."""

        def leader(self) -> int:
            return 0

        def close(self) -> None:
            pass

        def given(self) -> tuple[str, dict[str, str], Sequence[str] | None, EngineNode | None]:
            masks = {name: os.environ[name] for name in names if name in os.environ}
            return ray.get_runtime_context().get_node_id(), masks, self.told, self.node

    return SmallWorker


def seen_by_trainer(given: Given) -> Physical:
    """The device of a training process: the only one that its mask leaves (LOCAL in runtime/train_worker.py)."""
    (index,) = given.masks["CUDA_VISIBLE_DEVICES"].split(",")
    assert list(given.ids or ()) == [index]
    return given.node, int(index)


def seen_by_engine(given: Given, config: RolloutConfig) -> list[Physical]:
    """The devices of an engine's ranks on a node, in order, in the environment that its process is started with."""
    environment = dict(given.masks)
    for name, value in engine_environment(CUDA, config, (0,), given.ids, environ={}).items():
        environment.pop(name, None) if value is None else environment.update({name: value})
    return [(given.node, int(index)) for index in environment["CUDA_VISIBLE_DEVICES"].split(",")]


async def started(
    trainer: TrainerConfig, layout: RolloutLayout, patch: pytest.MonkeyPatch
) -> tuple[list[Physical], list[list[Physical]]]:
    """(the device of each training rank, those of each engine's ranks)."""
    worker = small_worker()
    patch.setattr(start, "RolloutWorker", worker)
    config = RolloutConfig(tp=layout.tp, dp=layout.dp, ep=layout.ep)
    places = await place(trainer, layout, CUDA)
    trainers = [
        ray.remote(worker).options(**bundle.options({"num_cpus": 0, "num_gpus": places.share})).remote()
        for bundle in places.train
    ]

    class Trainers:
        async def device_ids(self) -> list[list[str]]:
            return list(await asyncio.gather(*(each.device_ids.remote() for each in trainers)))

    served = Served(name="engine", directory=Path("model"), config=config)
    shared: Any = Trainers() if trainer.placement is Placement.colocated else None
    async with AsyncExitStack() as stack:
        for each in trainers:
            stack.callback(ray.kill, each)
        stack.callback(places.close)
        engines = await start.start_engines(served, places.rollout, CUDA, Path("logs"), stack, shared)
        ids = await Trainers().device_ids()
        seen = [Given(*await each.given.remote()) for each in trainers]
        theirs = [[Given(*await worker.given.remote()) for worker in engine._workers] for engine in engines]
    ranks = [seen_by_trainer(replace(given, ids=dealt)) for given, dealt in zip(seen, ids, strict=True)]
    for parts in theirs:
        places = [given.place for given in parts]
        assert [each and (each.nnodes, each.node_rank) for each in places] == [
            (len(parts), n) for n in range(len(parts))
        ]
    return ranks, [[device for given in parts for device in seen_by_engine(given, config)] for parts in theirs]


@pytest.mark.parametrize(
    ("nodes", "per_node", "layout"),
    [
        (1, 8, RolloutLayout(tp=4, dp=2)),
        (2, 4, RolloutLayout(tp=2, dp=4)),
        (1, 4, RolloutLayout(tp=2, dp=2, ep=4)),  # one engine of 4 ranks
        (2, 8, RolloutLayout(tp=1, dp=16)),
        (2, 8, RolloutLayout(tp=16)),  # one engine on both nodes
        (2, 4, RolloutLayout(tp=2, dp=4, ep=8)),  # two of its replicas on each
    ],
    ids=str,
)
def test_colocated_engines_compute_on_their_trainers_devices(
    three_nodes: None, nodes: int, per_node: int, layout: RolloutLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank r of all engines together is on the device of training rank r: where its weights are handed over."""
    trainer = TrainerConfig(nnodes=nodes, n_gpus_per_node=per_node, placement=Placement.colocated)
    ranks, engines = asyncio.run(started(trainer, layout, monkeypatch))
    assert len(set(ranks)) == nodes * per_node, "each training rank has a device of its own"
    assert [len({node for node, _ in ranks[i : i + per_node]}) for i in range(0, len(ranks), per_node)] == [1] * nodes
    assert [device for engine in engines for device in engine] == ranks


@pytest.mark.parametrize(
    ("nodes", "per_node", "layout"),
    [
        (1, 4, RolloutLayout(tp=4, dp=2)),
        (2, 4, RolloutLayout(tp=4, dp=2)),
        (1, 8, RolloutLayout(tp=16)),  # on two nodes
    ],
    ids=str,
)
def test_separate_engines_have_devices_of_their_own(
    three_nodes: None, nodes: int, per_node: int, layout: RolloutLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = TrainerConfig(nnodes=nodes, n_gpus_per_node=per_node, placement=Placement.separate)
    ranks, engines = asyncio.run(started(trainer, layout, monkeypatch))
    everyone = [*ranks, *(device for engine in engines for device in engine)]
    assert len(everyone) == len(set(everyone)) == nodes * per_node + layout.world_size
    for engine in engines:
        nodes = [node for node, _ in engine]
        assert len(engine) == layout.tp and len(set(nodes)) == engine_nodes(layout, PER_NODE)
        assert nodes == sorted(nodes, key=nodes.index), "the ranks of a node are neighbours"
