"""Who is started again, how often, and that samples which a death took are drawn again, once; with engines that answer
as they are told to.  Real deaths are in tests/crash."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.config.run import RunConfig
from mcore_rl.config.trainer import ResumeMode
from mcore_rl.controller.lifecycle import fault_tolerance
from mcore_rl.controller.lifecycle.fault_tolerance import EngineRestarter, Rollout, RunRestarts
from mcore_rl.errors import DeadEngineError, DeadWorkerError
from mcore_rl.rollout.protocol import Prompt, Request, Sampling

SAMPLING = Sampling(max_tokens=4)


class Engine:
    def __init__(self, name: str) -> None:
        self.name, self.lives, self.restarts = name, True, 0

    async def version(self) -> int:
        if not self.lives:
            raise DeadEngineError(f"{self.name} is gone")
        return 1

    async def restart(self) -> None:
        self.lives, self.restarts = True, self.restarts + 1


class Drawn:
    """What ``Rollout`` reads of a sample."""

    def __init__(self, request: Request) -> None:
        self.prompt_id, self.index = request.key


class Pool:
    """Dies after ``dies_after`` samples in all, then lives again; two calls at a time are ended by one death."""

    def __init__(self, dies_after: list[int]) -> None:
        self.dies_after, self.drawn, self.forgotten = dies_after, 0, 0
        self.dead = False
        self.asked: list[int] = []

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Any]:
        self.asked.append(len(requests))
        for request in requests:
            await asyncio.sleep(0)
            if self.dies_after and self.drawn >= self.dies_after[0]:
                self.dead = True
            if self.dead:
                raise DeadEngineError("engine 1 died")
            self.drawn += 1
            yield Drawn(request)

    def forget_deaths(self) -> None:
        self.forgotten += 1


class Hands:
    """A handover, whose revivals are counted; the pool lives again after each."""

    def __init__(self, pool: Pool, limit: int) -> None:
        self.pool, self.limit, self.revivals = pool, limit, 0

    async def revive(self, error: DeadEngineError) -> None:
        if self.revivals == self.limit:
            raise error
        self.revivals += 1
        await asyncio.sleep(0.01)
        self.pool.dead = False
        self.pool.dies_after.pop(0)


def requests(name: str, count: int) -> list[Request]:
    return [Request(prompt=Prompt(id=name, tokens=(1,)), index=index) for index in range(count)]


async def keys(rollout: Rollout, wanted: list[Request]) -> list[tuple[str, int]]:
    return [(each.prompt_id, each.index) async for each in rollout.generate(wanted, SAMPLING)]


def test_only_what_was_not_drawn_is_drawn_again() -> None:
    pool = Pool([3, 5])
    hands = Hands(pool, 9)
    wanted = requests("a", 8)
    found = asyncio.run(keys(Rollout(pool, hands), wanted))  # type: ignore[arg-type]
    assert found == [each.key for each in wanted]
    assert pool.asked == [8, 5, 3] and hands.revivals == 2


def test_one_death_that_ends_two_calls_is_answered_once() -> None:
    pool = Pool([5])
    hands = Hands(pool, 9)
    rollout = Rollout(pool, hands)  # type: ignore[arg-type]

    async def both() -> list[list[tuple[str, int]]]:
        return await asyncio.gather(keys(rollout, requests("a", 6)), keys(rollout, requests("b", 6)))

    found = asyncio.run(both())
    assert [len(set(each)) for each in found] == [6, 6] == [len(each) for each in found]
    assert hands.revivals == 1 and len(pool.asked) == 4


def test_too_many_deaths_are_raised() -> None:
    pool = Pool([1, 2, 3])
    with pytest.raises(DeadEngineError, match="engine 1 died"):
        asyncio.run(keys(Rollout(pool, Hands(pool, 2)), requests("a", 8)))  # type: ignore[arg-type]


def test_the_dead_are_started_again_and_the_living_are_left_alone() -> None:
    engines, pool, said = [Engine("engine 0"), Engine("engine 1")], Pool([]), list[str]()
    medic = EngineRestarter(engines, pool, 2, warn=said.append)  # type: ignore[arg-type]
    for number in range(2):
        engines[1].lives = False
        asyncio.run(medic.restart_dead(DeadEngineError("engine 1 died")))
        assert [engine.restarts for engine in engines] == [0, number + 1] and pool.forgotten == number + 1
    assert said[0] == "engine 1 died\nengine 1: started again, 1 of 2 restarts (trainer.max_restarts)"
    engines[1].lives = False
    with pytest.raises(DeadEngineError, match="engine 1 died"):
        asyncio.run(medic.restart_dead(DeadEngineError("engine 1 died")))
    assert engines[1].restarts == 2


@pytest.mark.parametrize("failures", [1, 3])
def test_one_that_dies_while_it_starts_again_is_one_more_death(monkeypatch: pytest.MonkeyPatch, failures: int) -> None:
    pauses, said = list[float](), list[str]()

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    class Stubborn(Engine):
        async def restart(self) -> None:
            self.restarts += 1
            if self.restarts <= failures:
                raise DeadEngineError(f"{self.name} died while starting again: no memory, {self.restarts}")
            self.lives = True

    monkeypatch.setattr(fault_tolerance.asyncio, "sleep", pause)
    engines, pool = [Engine("engine 0"), Stubborn("engine 1")], Pool([])
    engines[1].lives = False
    medic = EngineRestarter(engines, pool, 3, warn=said.append)  # type: ignore[arg-type]
    if failures == 3:
        with pytest.raises(DeadEngineError, match="starting again: no memory, 3"):
            asyncio.run(medic.restart_dead(DeadEngineError("engine 1 died")))
        assert pauses == [0, 5, 10] and pool.forgotten == 0
        return
    asyncio.run(medic.restart_dead(DeadEngineError("engine 1 died")))
    assert [engine.restarts for engine in engines] == [0, 2] and pauses == [0, 5] and pool.forgotten == 1
    assert said[1].startswith("engine 1 died while starting again: no memory, 1\nengine 1: started again, 2 of 3")
    assert said[2] == "engine 1: ready after 0 s"


def test_a_mistake_while_an_engine_starts_again_is_raised() -> None:
    class Wrong(Engine):
        async def restart(self) -> None:
            raise ValueError("no such device")

    engine = Wrong("engine 0")
    engine.lives = False
    with pytest.raises(ValueError, match="no such device"):
        asyncio.run(EngineRestarter([engine], Pool([]), 3, warn=print).restart_dead(DeadEngineError("engine 0 died")))  # type: ignore[arg-type]


def test_an_engine_that_does_not_answer_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(Engine):
        async def version(self) -> int:
            return 1 if self.restarts else await asyncio.Event().wait()  # type: ignore[func-returns-value]

    monkeypatch.setattr(fault_tolerance, "ANSWER_S", 0.01)
    engine = Silent("engine 0")
    asyncio.run(EngineRestarter([engine], Pool([]), 1, warn=lambda _: None).restart_dead(DeadEngineError("silence")))  # type: ignore[list-item, arg-type]
    assert engine.restarts == 1


def test_a_death_of_which_all_engines_live_is_raised() -> None:
    medic = EngineRestarter([Engine("engine 0")], Pool([]), 9, warn=lambda _: None)  # type: ignore[list-item, arg-type]
    with pytest.raises(DeadEngineError, match="its Ray actor"):
        asyncio.run(medic.restart_dead(DeadEngineError("its Ray actor is gone")))


def config() -> RunConfig:
    found = RunConfig()
    found.trainer.resume_mode = ResumeMode.off
    return found


def test_a_run_begins_again_where_its_newest_checkpoint_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(fault_tolerance.asyncio, "sleep", pause)
    checkpoints = [tmp_path / "step_4"]
    monkeypatch.setattr(fault_tolerance, "complete_checkpoints", lambda directory: checkpoints)
    said = list[str]()
    deaths = RunRestarts(3, tmp_path, warn=said.append)
    again = asyncio.run(deaths.answer(DeadWorkerError("rank 3 died\nmore"), config()))
    assert again.trainer.resume_mode is ResumeMode.auto
    assert said == ["rank 3 died\nmore\nrestart 1 of 3 (trainer.max_restarts) from step_4 in 5 s"]
    with pytest.raises(DeadWorkerError):  # at the same place: it would go on for ever
        asyncio.run(deaths.answer(DeadWorkerError("rank 3 died\nand so"), config()))
    asyncio.run(deaths.answer(DeadWorkerError("rank 2 died"), config()))
    checkpoints.append(tmp_path / "step_8")
    asyncio.run(deaths.answer(DeadWorkerError("rank 2 died"), config()))
    assert pauses == [5, 10, 20]
    with pytest.raises(DeadWorkerError, match="rank 1"):
        asyncio.run(deaths.answer(DeadWorkerError("rank 1 died"), config()))


def test_without_a_checkpoint_it_begins_as_it_was_told_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_tolerance, "FIRST_PAUSE_S", 0.0)
    deaths = RunRestarts(1, tmp_path, warn=lambda _: None)
    again = asyncio.run(deaths.answer(DeadWorkerError("rank 3 died"), config()))
    assert again.trainer.resume_mode is ResumeMode.off


def test_pauses_grow_to_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = list[float]()

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(fault_tolerance.asyncio, "sleep", pause)
    deaths = RunRestarts(6, tmp_path, warn=lambda _: None)
    for rank in range(6):
        asyncio.run(deaths.answer(DeadWorkerError(f"rank {rank} died"), config()))
    assert pauses == [5, 10, 20, 40, 60, 60]
