"""Restarts engines that died or hung, and the whole run if a training process did.

A training process that dies leaves its peers in the middle of a step, so all restart from the newest checkpoint.  A
restarted engine has no weights; ``weight_sync`` sends it the actor's, and ``resending_pool`` sends
it the requests that the dead one had not finished.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Protocol, TypeVar

from mcore_rl.config.offline import OfflineConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.config.trainer import ResumeMode
from mcore_rl.controller.lifecycle.messages import warn
from mcore_rl.controller.lifecycle.run_checkpoints import complete_checkpoints, how_to_go_on
from mcore_rl.controller.step.preemption import Preempted
from mcore_rl.ground.errors import DeadEngineError, DeadWorkerError
from mcore_rl.runtime.engine_client import EngineClient
from mcore_rl.tracking.messages import say

C = TypeVar("C", bound=RunConfig | OfflineConfig)
T = TypeVar("T")
ANSWER_S = 30.0  # the time limit for an engine to prove that it is alive
FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 60.0


class Pool(Protocol):
    """What works with engines and must know when those that died are alive again."""

    def mark_alive(self) -> None:
        """Uses every engine again."""
        ...


class EngineRestarter:
    """Restarts engines that died; the client of one that hung has killed it.

    Args:
        engines: the rollout's, or those of a reward model.
        pool: works with all of them.
        limit: restarts in the whole run, of all engines together; 0: every death ends the run.
        warn: receives a message about each death and each restart.
    """

    def __init__(self, engines: Sequence[EngineClient], pool: Pool, limit: int, *, warn: Callable[[str], None]) -> None:
        self._engines = list(engines)
        self._pool = pool
        self._limit = limit
        self._warn = warn
        self.num_restarts = 0
        self._num_recoveries = 0
        self._recovering = asyncio.Lock()

    def add(self, engine: EngineClient) -> None:
        """Restarts this one too, from now on."""
        self._engines.append(engine)

    def remove(self, engine: EngineClient) -> None:
        """Lets ``engine`` end when it does."""
        self._engines.remove(engine)

    async def restart_dead(self, error: DeadEngineError) -> None:
        """Restarts every engine that does not answer; returns when all are alive.

        An engine that dies again while it starts counts as another death, and is restarted after a pause: its node or
        its device's memory may take a moment to be available again.

        Raises ``error``, or a later death, if the restart limit is reached, or if all engines turn out to be alive.
        """
        begun = time.monotonic()
        restarted = dict[str, None]()
        for attempt in count():
            alive = await asyncio.gather(*(_is_alive(engine) for engine in self._engines))
            dead = [engine for engine, lives in zip(self._engines, alive, strict=True) if not lives]
            if not dead or self.num_restarts + len(dead) > self._limit:
                raise error
            self.num_restarts += len(dead)
            restarted |= dict.fromkeys(engine.name for engine in dead)
            count_of_limit = f"{self.num_restarts} of {self._limit} restarts (trainer.max_restarts)"
            self._warn(f"{error}\n{', '.join(engine.name for engine in dead)}: started again, {count_of_limit}")
            await asyncio.sleep(_pause_s(attempt))
            ends = await asyncio.gather(*(engine.restart() for engine in dead), return_exceptions=True)
            for end in ends:
                if isinstance(end, BaseException) and not isinstance(end, DeadEngineError):
                    raise end
            deaths = [end for end in ends if isinstance(end, DeadEngineError)]
            if not deaths:
                break
            error = deaths[0]
        self._pool.mark_alive()
        self._warn(f"{', '.join(restarted)}: ready after {time.monotonic() - begun:.0f} s")

    async def repeat(self, work: Callable[[], Awaitable[T]]) -> T:
        """Returns the result of ``work``; if engines die meanwhile, restarts them and calls ``work`` again.

        Raises as ``restart_dead``.
        """
        while True:
            try:
                return await work()
            except DeadEngineError as error:
                death = error
            await self.restart_dead(death)

    async def shared(self, work: Callable[[], Awaitable[T]]) -> T:
        """As ``repeat``, of many calls at once, which one death ends together: engines are restarted once for all."""
        while True:
            num_recoveries = self._num_recoveries
            try:
                return await work()
            except DeadEngineError as error:
                death = error
            async with self._recovering:
                if self._num_recoveries == num_recoveries:
                    await self.restart_dead(death)
                    self._num_recoveries += 1


class RunRestarts:
    """Counts how often a run was restarted because a training process died.

    Args:
        limit: how often it may be restarted; 0: the first death ends it.
        directory: the run directory, with its checkpoints.
        warn: receives a message about each death and each restart.
    """

    def __init__(self, limit: int, directory: Path, *, warn: Callable[[str], None]) -> None:
        self._limit = limit
        self._directory = directory
        self._warn = warn
        self._count = 0
        self._last = ""

    async def answer(self, error: DeadWorkerError, config: C) -> C:
        """Waits for a growing pause, then returns the configuration with which to restart.

        Raises ``error`` again if the restart limit is reached, or if the same death happens twice without a new
        checkpoint in between.
        """
        checkpoints = complete_checkpoints(self._directory)
        newest = checkpoints[-1].name if checkpoints else "the beginning"
        this = f"{newest}: {str(error).splitlines()[0]}"
        if self._count == self._limit or this == self._last:
            raise error
        self._count = self._count + 1
        self._last = this
        pause_s = _pause_s(self._count)
        again = f"restart {self._count} of {self._limit} (trainer.max_restarts) from {newest} in {pause_s:.0f} s"
        self._warn(f"{error}\n{again}")
        await asyncio.sleep(pause_s)
        if not checkpoints:
            return config
        return replace(config, trainer=replace(config.trainer, resume_mode=ResumeMode.auto, resume_from_path=None))


async def run_with_restarts(config: C, attempt: Callable[[C], Awaitable[T]]) -> T:
    """Returns the result of ``attempt``; if a training process dies, calls it again from the newest checkpoint.

    Raises Preempted if the run was told to end and has saved; the message says how to continue it, as at Ctrl-C.
    """
    directory = Path(config.trainer.default_local_dir)
    deaths = RunRestarts(config.trainer.max_restarts, directory, warn=warn)
    with stop_explained(directory):
        while True:
            try:
                return await attempt(config)
            except Preempted as left:
                raise Preempted(f"{left}. {how_to_go_on(directory)}") from None
            except DeadWorkerError as error:
                config = await deaths.answer(error, config)


@contextmanager
def stop_explained(run_dir: Path) -> Iterator[None]:
    """While active: Ctrl-C shows how to continue the run, before its exception goes on."""
    try:
        yield
    except (asyncio.CancelledError, KeyboardInterrupt):
        say(how_to_go_on(run_dir))
        raise


async def _is_alive(engine: EngineClient) -> bool:
    try:
        await asyncio.wait_for(engine.version(), ANSWER_S)  # vLLM's own loop answers it
    except (DeadEngineError, TimeoutError):
        return False
    return True


def _pause_s(number: int) -> float:
    """Seconds to wait before an attempt that follows ``number`` others; twice as long each time."""
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (number - 1)) if number else 0.0
