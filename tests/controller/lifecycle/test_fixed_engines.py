"""Texts over engines: to the one with the least to read, to none that sleeps, and again to one that was restarted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from mcore_rl.controller.lifecycle.fixed_engines import FixedEngines
from mcore_rl.ground.errors import DeadEngineError


class Scripted:
    """Answers with the sum of the tokens once ``gate`` is set; fails on a text that begins with 0."""

    def __init__(self, name: str) -> None:
        self.name, self.told = name, []  # type: ignore[var-annotated]
        self.texts: list[int] = []  # their lengths
        self.gate = asyncio.Event()
        self.is_dead = False

    async def classify(self, texts: Sequence[Sequence[int]]) -> list[float | str]:
        if self.is_dead:
            raise DeadEngineError(f"{self.name} died")
        self.texts += map(len, texts)
        await self.gate.wait()
        if texts[0][0] == 0:
            raise DeadEngineError(f"{self.name} died")
        return [float(sum(text)) for text in texts]

    async def sleep(self, level: int = 1) -> None:
        self.told.append(("sleep", level))

    async def wake(self, memory: object = None) -> None:
        self.told.append(("wake",))

    async def version(self) -> int:
        if self.is_dead:
            raise DeadEngineError(f"{self.name} died")
        return 0

    async def restart(self) -> None:
        await asyncio.sleep(0.05)
        self.is_dead = False
        self.told.append(("restart",))

    async def shutdown(self) -> None:
        raise AssertionError("who started them ends them")


def fixed(engines: Sequence[Scripted], max_restarts: int = 0) -> FixedEngines:
    return FixedEngines(engines, 8, max_restarts)  # type: ignore[arg-type]


def test_a_text_goes_where_the_fewest_tokens_are() -> None:
    async def run() -> None:
        engines = [Scripted("a"), Scripted("b")]
        pool = fixed(engines)
        tasks = []
        for length in (10, 3, 4, 2, 5):
            tasks.append(asyncio.create_task(pool.classify([1] * length)))
            await asyncio.sleep(0)
        assert [engine.texts for engine in engines] == [[10], [3, 4, 2, 5]]
        for engine in engines:
            engine.gate.set()
        assert await asyncio.gather(*tasks) == [10.0, 3.0, 4.0, 2.0, 5.0]
        await pool.classify([1])
        assert engines[0].texts == [10, 1], "what was read is no load any more"

    asyncio.run(run())


def test_a_death_is_raised_and_frees_its_place() -> None:
    async def run() -> None:
        engine = Scripted("a")
        engine.gate.set()
        pool = fixed([engine])
        with pytest.raises(DeadEngineError, match="a died"):
            await pool.classify([0, 1])
        assert await pool.classify([2, 3]) == 5.0

    asyncio.run(run())


def test_nothing_is_read_by_an_engine_that_sleeps() -> None:
    async def run() -> None:
        engine = Scripted("a")
        pool = fixed([engine])
        early = asyncio.create_task(pool.classify([1, 2]))
        await asyncio.sleep(0)
        sleeping = asyncio.create_task(pool.sleep())
        late = asyncio.create_task(pool.classify([3]))
        for _ in range(5):
            await asyncio.sleep(0)
        assert engine.texts == [2] and engine.told == [], "what is being read is read before"
        engine.gate.set()
        await sleeping
        assert await early == 3.0 and engine.told == [("sleep", 1)]
        for _ in range(5):
            await asyncio.sleep(0)
        assert engine.texts == [2] and not late.done(), "the rest waits"
        await pool.wake()
        assert await late == 3.0 and engine.texts == [2, 1]

    asyncio.run(run())


def test_all_sleep_with_their_weights_and_all_wake() -> None:
    async def run() -> None:
        engines = [Scripted("a"), Scripted("b")]
        pool = fixed(engines)
        await pool.sleep()
        await pool.wake()
        assert all(engine.told == [("sleep", 1), ("wake",)] for engine in engines), (
            "level 2 would drop what nobody sends again"
        )

    asyncio.run(run())


def test_texts_of_an_engine_that_died_are_read_again_before_it_sleeps() -> None:
    async def run() -> None:
        engine = Scripted("a")
        engine.gate.set()
        engine.is_dead = True
        pool = fixed([engine], max_restarts=1)
        texts = [asyncio.create_task(pool.classify([1, 2])), asyncio.create_task(pool.classify([3]))]
        await asyncio.sleep(0)
        await pool.sleep()
        assert [text.done() for text in texts] == [True, True] and engine.told == [("restart",), ("sleep", 1)]
        assert await asyncio.gather(*texts) == [3.0, 3.0]

    asyncio.run(run())
