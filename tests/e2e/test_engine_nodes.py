"""One engine on two nodes, as far as one machine can be two: real vLLM, real weights, and what each node's death does.

Each node's processes have a group and sockets of their own, and share no memory with the other's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from mcore_rl.config.rollout import parse_rollout_layout
from mcore_rl.ground.errors import DeadEngineError, RolloutError
from mcore_rl.rollout.protocol import VersionSpan
from mcore_rl.rollout.vllm.engine.engine_node import EngineNode, Meeting, free_port
from mcore_rl.rollout.vllm.engine.environment import core_shares, usable_cores
from mcore_rl.rollout.vllm.engine.process import EngineProcess
from mcore_rl.rollout.vllm.engine.process_group import group_of, shared_memory_of
from mcore_rl.runtime.each_node import store_at
from mcore_rl.sync.update import WeightUpdater
from tests.support import rollouts, sync_cases
from tests.support.live_trainers import LiveTrainers, in_two_stages
from tests.support.rollouts import wait_until_gone
from tests.support.sync_cases import MODELS, distance_from_transformers, greedy

pytestmark = pytest.mark.tier("full")
NAME, LAYOUT = "qwen2", "tp=2"
TOLERANCE = 1e-5  # float32, another order of sums


def own_address() -> str:
    """An address of this machine by which others would reach it, if it has one."""
    addresses = [each.address for those in psutil.net_if_addrs().values() for each in those]
    own = [each for each in addresses if each.count(".") == 3 and not each.startswith("127.")]
    return own[0] if own else "127.0.0.1"


@pytest.fixture
def trainers(processes: None) -> Iterator[LiveTrainers]:
    with LiveTrainers() as live:
        yield live


@contextmanager
def on_two_nodes(directory: Path, *, awaits_weights: bool) -> Iterator[list[EngineProcess]]:
    """The engine, and its part on the other node."""
    host = own_address()
    with store_at(host) as port:
        meeting = Meeting(host=host, port=port, rpc_port=free_port(host))
        nodes = [EngineNode(nnodes=2, node_rank=rank, address=host, meeting=meeting) for rank in range(2)]
        cores = core_shares(usable_cores(), 2)
        parts = [
            sync_cases.engine(directory, LAYOUT, awaits_weights=awaits_weights, wait=False, cores=each, node=node)
            for each, node in zip(cores, nodes, strict=True)
        ]
        with parts[0], parts[1]:
            for part in parts:
                part.wait_until_ready()
            yield parts


def listening(part: EngineProcess) -> set[str]:
    """The addresses at which a node's processes listen."""
    connections = [each for process in group_of(part.pid) for each in process.net_connections("tcp")]
    return {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN}


def workers(part: EngineProcess) -> list[psutil.Process]:
    """vLLM's workers of a node: of its processes, those that have started no other."""
    processes = group_of(part.pid)
    parents = {each.ppid() for each in processes}
    return [each for each in processes if each.pid not in parents]


def test_an_engine_of_two_nodes_draws_is_updated_and_dies_as_a_whole(trainers: LiveTrainers, tmp_path: Path) -> None:
    a, b = sync_cases.write(NAME, tmp_path)
    with on_two_nodes(a, awaits_weights=False) as (engine, part):
        outcomes = asyncio.run(_live(trainers, engine, part, a, b))
        leaders = [engine.pid, part.pid]
        asyncio.run(_die(engine, part))
    for leader in leaders:
        wait_until_gone(leader)
    with on_two_nodes(a, awaits_weights=True) as (engine, part):
        assert asyncio.run(_again(trainers, engine, a, b)) == outcomes


async def _live(trainers: LiveTrainers, engine: EngineProcess, part: EngineProcess, a: Path, b: Path) -> list[object]:
    assert await engine.call_workers(rollouts.check_health) == [None, None]
    assert [len(workers(each)) for each in (engine, part)] == [1, 1], "a rank on each node"
    assert not any(shared_memory_of(group_of(each.pid)) for each in (engine, part)), "the ranks share no memory"
    assert listening(engine) | listening(part) == {own_address()}, "at the interface of the cluster and nowhere else"
    fresh = await greedy(engine)
    assert distance_from_transformers(fresh, a) < TOLERANCE
    return await _updates(trainers, engine, a, b)


async def _updates(trainers: LiveTrainers, engine: EngineProcess, a: Path, b: Path) -> list[object]:
    """To b, through sleep and waking, and back to a; what was drawn with b, bit for bit.

    Training rank r receives for rollout rank r, on its node.
    """
    await trainers.build(NAME, MODELS[NAME], LAYOUT, a, LAYOUT, in_two_stages)
    sync = WeightUpdater([engine], parse_rollout_layout(LAYOUT), trainers)
    for version, weights in enumerate((b, a, b), start=1):
        await trainers.order("load", weights)
        await engine.sleep(2)
        await engine.wake()
        published = await sync.update(version)
        assert all(each.bytes_over_bound == 1.0 and each.num_bytes > 0 for each in published)
        samples = await greedy(engine)
        assert distance_from_transformers(samples, weights) < TOLERANCE
        assert all(sample.versions == (VersionSpan(version=version, start=0, end=10),) for sample in samples)
        await sync.check()  # every tensor that every worker executes with, on both nodes
    return [(sample.tokens.tolist(), sample.logprobs.tolist()) for sample in samples]


async def _die(engine: EngineProcess, part: EngineProcess) -> None:
    """The other node's worker is killed: its part says so, and the engine answers no more."""
    watching = asyncio.create_task(part.watch())
    await part_is_watched(watching)
    (worker,) = workers(part)
    worker.kill()
    with pytest.raises(DeadEngineError, match=r"engine \(node 1\) died while serving: vLLM's VllmWorker-1"):
        await watching
    with pytest.raises(DeadEngineError, match="died while"):
        await part.watch()
    engine.close()


async def part_is_watched(watching: asyncio.Task[None]) -> None:
    """The call is on its way; it has no answer yet."""
    done, _ = await asyncio.wait([watching], timeout=1.0)
    assert not done


async def _again(trainers: LiveTrainers, engine: EngineProcess, a: Path, b: Path) -> list[object]:
    with pytest.raises(RolloutError, match="it was started without weights"):
        await greedy(engine)
    return await _updates(trainers, engine, a, b)
