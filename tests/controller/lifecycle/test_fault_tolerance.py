"""Who is restarted, and how often; with engines that answer as they are told to.  Real deaths are in tests/crash."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from mcore_rl.config.run import RunConfig
from mcore_rl.config.trainer import ResumeMode
from mcore_rl.controller.lifecycle import fault_tolerance
from mcore_rl.controller.lifecycle.fault_tolerance import EngineRestarter, RunRestarts
from mcore_rl.ground.errors import DeadEngineError, DeadWorkerError


class Engine:
    def __init__(self, name: str) -> None:
        self.name, self.lives, self.restarts = name, True, 0

    async def version(self) -> int:
        if not self.lives:
            raise DeadEngineError(f"{self.name} is gone")
        return 1

    async def restart(self) -> None:
        self.lives, self.restarts = True, self.restarts + 1


class Pool:
    """Is told that its engines live again."""

    def __init__(self) -> None:
        self.told = 0

    def mark_alive(self) -> None:
        self.told += 1


def test_the_dead_are_started_again_and_the_living_are_left_alone() -> None:
    engines, pool, said = [Engine("engine 0"), Engine("engine 1")], Pool(), list[str]()
    restarter = EngineRestarter(engines, pool, 2, warn=said.append)  # type: ignore[arg-type]
    for number in range(2):
        engines[1].lives = False
        asyncio.run(restarter.restart_dead(DeadEngineError("engine 1 died")))
        assert [engine.restarts for engine in engines] == [0, number + 1] and pool.told == number + 1
    assert said[0] == "engine 1 died\nengine 1: started again, 1 of 2 restarts (trainer.max_restarts)"
    engines[1].lives = False
    with pytest.raises(DeadEngineError, match="engine 1 died"):
        asyncio.run(restarter.restart_dead(DeadEngineError("engine 1 died")))
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
    engines, pool = [Engine("engine 0"), Stubborn("engine 1")], Pool()
    engines[1].lives = False
    restarter = EngineRestarter(engines, pool, 3, warn=said.append)  # type: ignore[arg-type]
    if failures == 3:
        with pytest.raises(DeadEngineError, match="starting again: no memory, 3"):
            asyncio.run(restarter.restart_dead(DeadEngineError("engine 1 died")))
        assert pauses == [0, 5, 10] and pool.told == 0
        return
    asyncio.run(restarter.restart_dead(DeadEngineError("engine 1 died")))
    assert [engine.restarts for engine in engines] == [0, 2] and pauses == [0, 5] and pool.told == 1
    assert said[1].startswith("engine 1 died while starting again: no memory, 1\nengine 1: started again, 2 of 3")
    assert said[2] == "engine 1: ready after 0 s"


def test_a_mistake_while_an_engine_starts_again_is_raised() -> None:
    class Wrong(Engine):
        async def restart(self) -> None:
            raise ValueError("no such device")

    engine = Wrong("engine 0")
    engine.lives = False
    with pytest.raises(ValueError, match="no such device"):
        asyncio.run(EngineRestarter([engine], Pool(), 3, warn=print).restart_dead(DeadEngineError("engine 0 died")))  # type: ignore[arg-type]


def test_an_engine_that_does_not_answer_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(Engine):
        async def version(self) -> int:
            return 1 if self.restarts else await asyncio.Event().wait()  # type: ignore[func-returns-value]

    monkeypatch.setattr(fault_tolerance, "ANSWER_S", 0.01)
    engine = Silent("engine 0")
    asyncio.run(EngineRestarter([engine], Pool(), 1, warn=lambda _: None).restart_dead(DeadEngineError("silence")))  # type: ignore[list-item, arg-type]
    assert engine.restarts == 1


def test_a_death_of_which_all_engines_live_is_raised() -> None:
    restarter = EngineRestarter([Engine("engine 0")], Pool(), 9, warn=lambda _: None)  # type: ignore[list-item, arg-type]
    with pytest.raises(DeadEngineError, match="its Ray actor"):
        asyncio.run(restarter.restart_dead(DeadEngineError("its Ray actor is gone")))


def test_work_begins_anew_after_each_restart() -> None:
    engine, pool, calls = Engine("engine 0"), Pool(), list[int]()
    restarter = EngineRestarter([engine], pool, 2, warn=lambda _: None)  # type: ignore[list-item, arg-type]

    def work(deaths: int) -> Callable[[], Awaitable[str]]:
        async def call() -> str:
            calls.append(engine.restarts)
            if engine.restarts < deaths:
                engine.lives = False
                raise DeadEngineError(f"death {engine.restarts + 1}")
            return "done"

        return call

    assert asyncio.run(restarter.repeat(work(2))) == "done"
    assert calls == [0, 1, 2] and restarter.num_restarts == 2
    with pytest.raises(DeadEngineError, match="death 3"):
        asyncio.run(restarter.repeat(work(3)))


def config() -> RunConfig:
    settings = RunConfig()
    settings.trainer.resume_mode = ResumeMode.off
    return settings


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
