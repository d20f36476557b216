"""An engine below a Ray actor: errors arrive as they were raised, cancelling reaches it, and its death is named."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
import ray

from mcore_rl.errors import DeadEngineError, RolloutError
from mcore_rl.rollout.protocol import Prompt, Request, Sample, Sampling
from mcore_rl.runtime.rollout_worker import RayEngine
from tests.support.answerers import Scripted

SAMPLING = Sampling(max_tokens=4)


@pytest.fixture(scope="module", autouse=True)
def cluster(processes: None) -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def engine() -> RayEngine:
    return RayEngine("engine 7", lambda: ray.remote(Scripted).options(num_cpus=0).remote("engine 7"))


def request(name: str, index: int = 0) -> Request:
    return Request(prompt=Prompt(id=name, tokens=(1,)), index=index)


async def gather(samples: AsyncIterator[Sample]) -> list[Sample]:
    return [each async for each in samples]


def test_samples_arrive_whole(engine: RayEngine) -> None:
    found = asyncio.run(gather(engine.generate([request("a"), request("a", 1)], SAMPLING)))
    assert [(each.prompt_id, each.index) for each in found] == [("a", 0), ("a", 1)]
    assert [each.tokens.tolist() for each in found] == [[1, 2], [1, 2]]


def test_verbs_reach_the_engine(engine: RayEngine) -> None:
    assert asyncio.run(engine.version()) == 7
    assert asyncio.run(engine.rpc("held", 1, "two", timeout_s=3.0)) == ["held", (1, "two"), 3.0]
    with pytest.raises(RolloutError, match="it does not wake"):
        asyncio.run(engine.wake())


def test_an_error_is_of_the_type_that_was_raised(engine: RayEngine) -> None:
    with pytest.raises(RolloutError, match="no room for refused") as error:
        asyncio.run(gather(engine.generate([request("refused")], SAMPLING)))
    assert type(error.value) is RolloutError


def test_cancelling_reaches_the_engine(engine: RayEngine) -> None:
    async def cancel() -> list[str]:
        waiting = asyncio.ensure_future(gather(engine.generate([request("forever")], SAMPLING)))
        while not await engine._call("ends"):
            await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        while len(ends := await engine._call("ends")) < 2:
            await asyncio.sleep(0.01)
        return list(ends)

    assert asyncio.run(cancel()) == ["begun", "aborted"]


def test_an_actor_that_is_gone_is_a_dead_engine_and_can_be_shut_down() -> None:
    engine = RayEngine("engine 9", lambda: ray.remote(Scripted).options(num_cpus=0).remote("engine 9"))
    asyncio.run(engine.version())
    ray.kill(engine.worker)
    with pytest.raises(DeadEngineError, match="engine 9 died while generating 1 samples: its Ray actor is gone"):
        asyncio.run(gather(engine.generate([request("a")], SAMPLING)))
    with pytest.raises(DeadEngineError, match="engine 9 died while in sleep"):
        asyncio.run(engine.sleep())
    asyncio.run(engine.shutdown())
