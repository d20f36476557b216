"""An engine below a Ray actor: errors arrive as they were raised, cancelling reaches it, and its death is named."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import ray
from torch.distributed import TCPStore

from mcore_rl.config.rollout import RolloutConfig
from mcore_rl.errors import DeadEngineError, RolloutError
from mcore_rl.rollout.engine.engine_node import ONE_NODE, EngineNode
from mcore_rl.rollout.protocol import Prompt, Request, Sample, Sampling
from mcore_rl.rollout.worker_methods import HeldWeightsMethods
from mcore_rl.runtime.engine_client import EngineClient, PartSpec
from tests.support.answerers import Scripted, ScriptedEngine, ScriptedPart

SAMPLING = Sampling(max_tokens=4)


@pytest.fixture(scope="module", autouse=True)
def cluster(processes: None) -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def engine() -> EngineClient:
    return new_engine("engine 7")


def request(name: str, index: int = 0) -> Request:
    return Request(prompt=Prompt(id=name, tokens=(1,)), index=index)


async def gather(samples: AsyncIterator[Sample]) -> list[Sample]:
    return [each async for each in samples]


def test_samples_arrive_whole(engine: EngineClient) -> None:
    samples = asyncio.run(gather(engine.generate([request("a"), request("a", 1)], SAMPLING)))
    assert [(each.prompt_id, each.index) for each in samples] == [("a", 0), ("a", 1)]
    assert [each.tokens.tolist() for each in samples] == [[1, 2], [1, 2]]


def test_verbs_reach_the_engine(engine: EngineClient) -> None:
    assert asyncio.run(engine.version()) == 7
    answer = asyncio.run(engine.call_workers(HeldWeightsMethods.held_differences, "folder", "tp=1"))
    assert answer == ["held_differences", ["folder", "tp=1"]]  # type: ignore[comparison-overlap]
    with pytest.raises(RolloutError, match="it does not wake"):
        asyncio.run(engine.wake())


def test_an_error_is_of_the_type_that_was_raised(engine: EngineClient) -> None:
    with pytest.raises(RolloutError, match="no room for refused") as error:
        asyncio.run(gather(engine.generate([request("refused")], SAMPLING)))
    assert type(error.value) is RolloutError


def test_cancelling_reaches_the_engine(engine: EngineClient) -> None:
    async def cancel() -> list[str]:
        waiting = asyncio.ensure_future(gather(engine.generate([request("forever")], SAMPLING)))
        while not await engine._ask("asked for its ends", ScriptedEngine.ends):
            await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        while len(ends := await engine._ask("asked for its ends", ScriptedEngine.ends)) < 2:
            await asyncio.sleep(0.01)
        return list(ends)

    assert asyncio.run(cancel()) == ["begun", "aborted"]


def new_engine(name: str) -> EngineClient:
    def new_worker() -> Any:
        return ray.remote(Scripted).options(num_cpus=0).remote(name)

    return EngineClient(name, [PartSpec(new_worker, Path("log"))])


def test_a_finished_sample_comes_at_once_and_leaving_then_aborts_the_rest() -> None:
    engine = new_engine("engine 5")

    async def leave() -> list[str]:
        samples = engine.generate([request("a"), request("forever")], SAMPLING)
        assert (await asyncio.wait_for(anext(samples), 60)).prompt_id == "a"
        while not await engine._ask("asked for its ends", ScriptedEngine.ends):
            await asyncio.sleep(0.01)
        await samples.aclose()
        while len(ends := await engine._ask("asked for its ends", ScriptedEngine.ends)) < 2:
            await asyncio.sleep(0.01)
        return list(ends)

    assert asyncio.run(leave()) == ["begun", "aborted"]
    asyncio.run(engine.shutdown())


def test_an_actor_that_dies_with_samples_under_way_is_a_dead_engine() -> None:
    engine = new_engine("engine 6")

    async def die() -> None:
        samples = engine.generate([request("a"), request("forever")], SAMPLING)
        await anext(samples)
        engine.kill()
        with pytest.raises(DeadEngineError, match="engine 6 died while generating 1 samples: its Ray actor is gone"):
            await asyncio.wait_for(anext(samples), 60)

    asyncio.run(die())


def test_an_actor_that_is_gone_is_a_dead_engine_and_can_be_shut_down() -> None:
    engine = new_engine("engine 9")
    asyncio.run(engine.version())
    engine.kill()
    with pytest.raises(DeadEngineError, match="engine 9 died while generating 1 samples: its Ray actor is gone"):
        asyncio.run(gather(engine.generate([request("a")], SAMPLING)))
    with pytest.raises(DeadEngineError, match="engine 9 died while going to sleep"):
        asyncio.run(engine.sleep())
    asyncio.run(engine.shutdown())


def engine_on_two_nodes(name: str) -> EngineClient:
    def new_worker() -> Any:
        return ray.remote(ScriptedPart).options(num_cpus=0).remote(name)

    return EngineClient(name, [PartSpec(new_worker, Path("log"))] * 2)


def test_the_parts_of_an_engine_are_told_where_they_meet() -> None:
    engine = engine_on_two_nodes("engine 1")

    async def started() -> list[EngineNode]:
        await engine.start(Path("model"), RolloutConfig(tp=2))
        places = [await worker.given.remote() for worker in engine._workers]
        TCPStore(places[0].meeting.host, places[0].meeting.port, is_master=False, timeout=timedelta(seconds=20))
        await engine.shutdown()
        return places

    first, second = asyncio.run(started())
    assert (first.nnodes, first.node_rank) == (2, 0) and (second.nnodes, second.node_rank) == (2, 1)
    assert first.meeting == second.meeting and first.meeting is not None
    assert first.meeting.host == first.address and first.meeting.port != first.meeting.rpc_port


def test_an_engine_on_one_node_has_nobody_to_meet() -> None:
    def new_worker() -> Any:
        return ray.remote(ScriptedPart).options(num_cpus=0).remote("engine 2")

    async def started() -> EngineNode:
        engine = EngineClient("engine 2", [PartSpec(new_worker, Path("log"))])
        await engine.start(Path("model"), RolloutConfig())
        given: EngineNode = await engine._workers[0].given.remote()
        await engine.shutdown()
        return given

    assert asyncio.run(started()) == ONE_NODE


def test_the_death_of_a_part_is_the_engine_s_until_it_is_started_again() -> None:
    engine = engine_on_two_nodes("engine 3")

    async def die() -> None:
        await engine.start(Path("model"), RolloutConfig(tp=2))
        samples = engine.generate([request("a"), request("forever")], SAMPLING)
        await anext(samples)
        await engine._workers[1].perform.remote("be_killed", (), {})
        message = "engine 3 died while generating 1 samples: its worker was killed"
        with pytest.raises(DeadEngineError, match=message):
            await asyncio.wait_for(anext(samples), 60)
        with pytest.raises(DeadEngineError, match="engine 3 died while asked for its version: its worker was killed"):
            await engine.version()
        before = list(engine._workers)
        await engine.restart()
        assert await engine.version() == 7
        for worker in before:
            with pytest.raises(ray.exceptions.RayActorError):
                await worker.given.remote()
        await engine.shutdown()

    asyncio.run(die())


def test_a_part_whose_node_is_gone_is_named() -> None:
    engine = engine_on_two_nodes("engine 4")

    async def die() -> None:
        await engine.start(Path("model"), RolloutConfig(tp=2))
        ray.kill(engine._workers[1])
        samples = engine.generate([request("forever")], SAMPLING)
        with pytest.raises(DeadEngineError, match=r"engine 4 died while generating 1 samples: .*its Ray actor is gone"):
            await asyncio.wait_for(anext(samples), 60)
        await engine.shutdown()

    asyncio.run(die())


def test_a_part_that_does_not_start_ends_the_wait_for_the_others() -> None:
    engine = engine_on_two_nodes("engine that fails")

    async def start() -> None:
        with pytest.raises(RolloutError, match="the second node has no room"):
            await asyncio.wait_for(engine.start(Path("model"), RolloutConfig(tp=2)), 60)
        engine.kill()

    asyncio.run(start())
