"""The queue by itself, over engines that take a set time for each token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import numpy as np
import pytest

from mcore_rl.errors import DeadEngineError, RolloutError
from mcore_rl.rollout.pool import EnginePool
from mcore_rl.rollout.protocol import EngineMemory, FinishReason, Prompt, Request, Sample, Sampling, requests_of

SAMPLING = Sampling(max_tokens=8)
TICK_S = 0.001


class Engine:
    """Runs ``seats`` samples at once, a tick for every token of the prompt; dies after ``life`` samples."""

    def __init__(self, name: str, seats: int = 4, life: int | None = None) -> None:
        self.name, self.life = name, life
        self.seats = asyncio.Semaphore(seats)
        self.prompts: list[str] = []
        self.tokens = self.unfinished = self.most = 0
        self.cancelled = False
        self.told: list[tuple[object, ...]] = []

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Sample]:
        self.unfinished += len(requests)
        self.most = max(self.most, self.unfinished)
        self.prompts.append(requests[0].prompt.id)
        try:
            for request in requests:
                if "bad" in request.prompt.id:
                    raise RolloutError("a bad prompt")
                async with self.seats:
                    await asyncio.sleep(TICK_S * len(request.tokens))
                if self.life is not None:
                    self.life -= 1
                    if self.life < 0:
                        raise DeadEngineError(f"{self.name} died of old age")
                self.tokens += len(request.tokens)
                self.unfinished -= 1
                yield sample_of(request)
        except asyncio.CancelledError:
            self.cancelled = True
            raise

    async def sleep(self, level: int = 1) -> None:
        if self.life is not None and self.life < 0:
            raise DeadEngineError(f"{self.name} died of old age")
        self.told.append(("sleep", level))

    async def wake(self, memory: EngineMemory | None = None) -> None:
        self.told.append(("wake",) if memory is None else ("wake", memory))


def sample_of(request: Request) -> Sample:
    empty = np.zeros(3)
    return Sample(
        prompt_id=request.prompt.id,
        index=request.index,
        tokens=empty.astype(np.int32),
        logprobs=empty.astype(np.float32),
        versions=(),
        finish=FinishReason.length,
    )


def prompt(name: str, length: int) -> Prompt:
    return Prompt(id=name, tokens=(1,) * length)


async def keys(pool: EnginePool, requests: Sequence[Request]) -> list[tuple[str, int]]:
    return [(sample.prompt_id, sample.index) async for sample in pool.generate(requests, SAMPLING)]


def test_every_sample_comes_once_and_a_prompt_stays_on_one_engine() -> None:
    async def run() -> None:
        engines = [Engine("1"), Engine("2"), Engine("3")]
        requests = requests_of([prompt(f"p{i}", 1 + i % 5) for i in range(20)], 3)
        drawn = await keys(EnginePool(engines, 4), requests)
        assert sorted(drawn) == sorted(request.key for request in requests)
        assert sorted(name for engine in engines for name in engine.prompts) == sorted(f"p{i}" for i in range(20))
        assert all(engine.prompts for engine in engines)

    asyncio.run(run())


def test_long_prompts_are_spread_by_their_tokens_and_go_first() -> None:
    async def run() -> None:
        engines = [Engine("1", seats=2), Engine("2", seats=2)]
        lengths = [60, 50, 40, 30, *[5] * 24]
        requests = requests_of([prompt(f"p{i}", length) for i, length in enumerate(lengths)][::-1], 1)
        await keys(EnginePool(engines, 4), requests)
        assert {engine.prompts[0] for engine in engines} == {"p0", "p1"}
        assert abs(engines[0].tokens - engines[1].tokens) <= 60  # of 300; by count alone it could be all four long ones

    asyncio.run(run())


def test_an_engine_is_given_little_more_than_it_runs_at_once() -> None:
    async def run() -> None:
        engines = [Engine("1", seats=4), Engine("2", seats=4)]
        await keys(EnginePool(engines, 4), requests_of([prompt(f"p{i}", 2) for i in range(40)], 1))
        assert 4 <= max(engine.most for engine in engines) <= 5

    asyncio.run(run())


def test_a_group_larger_than_an_engine_is_still_drawn() -> None:
    drawn = asyncio.run(keys(EnginePool([Engine("1")], 2), requests_of([prompt("p", 1), prompt("q", 1)], 9)))
    assert len(drawn) == 18


def test_a_dead_engine_is_raised_and_the_rest_is_aborted() -> None:
    async def run() -> None:
        engines = [Engine("1"), Engine("2", life=2)]
        pool = EnginePool(engines, 4)
        with pytest.raises(DeadEngineError, match="2 died of old age"):
            await keys(pool, requests_of([prompt(f"p{i}", 5) for i in range(10)], 2))
        assert engines[0].cancelled
        with pytest.raises(DeadEngineError, match="2 died of old age"):
            await keys(pool, requests_of([prompt("p", 1)], 1))

    asyncio.run(run())


def test_a_restarted_engine_is_drawn_with_again_once_it_is_said_to_live() -> None:
    async def run() -> None:
        engines = [Engine("1"), Engine("2", life=3)]
        pool = EnginePool(engines, 4)
        requests = requests_of([prompt(f"p{i}", 2) for i in range(10)], 2)
        with pytest.raises(DeadEngineError, match="2 died of old age"):
            await keys(pool, requests)
        engines[1].life = None  # restarted
        with pytest.raises(DeadEngineError, match="2 died of old age"):
            await keys(pool, requests)
        pool.mark_alive()
        drawn = engines[1].tokens
        assert sorted(await keys(pool, requests)) == sorted(request.key for request in requests)
        assert engines[1].tokens > drawn, "and not by the other alone"

    asyncio.run(run())


def test_a_refused_prompt_is_raised_and_kills_nobody() -> None:
    async def run() -> None:
        pool = EnginePool([Engine("1"), Engine("2")], 4)
        with pytest.raises(RolloutError, match="a bad prompt"):
            await keys(pool, requests_of([prompt("p", 3), prompt("bad", 3)], 1))
        assert len(await keys(pool, requests_of([prompt("p", 3)], 2))) == 2

    asyncio.run(run())


def test_leaving_early_gives_all_room_back() -> None:
    async def run() -> None:
        pool = EnginePool([Engine("1")], 4)
        samples = pool.generate(requests_of([prompt(f"p{i}", 5) for i in range(20)], 1), SAMPLING)
        await anext(samples)
        await samples.aclose()  # type: ignore[attr-defined]
        assert len(await asyncio.wait_for(keys(pool, requests_of([prompt("p", 1)], 4)), 5)) == 4

    asyncio.run(run())


def test_all_engines_sleep_and_wake_and_a_death_is_raised_once_all_have_answered() -> None:
    async def run() -> None:
        engines = [Engine("1"), Engine("2")]
        pool = EnginePool(engines, 4)
        await pool.sleep(2)
        await pool.wake(EngineMemory.weights)
        assert [engine.told for engine in engines] == [[("sleep", 2), ("wake", EngineMemory.weights)]] * 2
        engines[0].life = -1
        with pytest.raises(DeadEngineError, match="1 died of old age"):
            await pool.sleep()
        assert engines[1].told[2:] == [("sleep", 1)]

    asyncio.run(run())
