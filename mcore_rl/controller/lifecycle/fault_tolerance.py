"""What dies while a run goes on: an engine is started again, and so is the whole run where a training process dies.

A training process that dies leaves its peers in the middle of a step: all begin anew, from the newest checkpoint.  A
new engine begins with the first weights, gets the actor's before it draws anything, and draws what the old one had not
finished: every sample has a seed of its own, so that it comes out the same.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TypeVar

from mcore_rl.config.run import RunConfig
from mcore_rl.config.sft import SftConfig
from mcore_rl.config.trainer import ResumeMode
from mcore_rl.controller.lifecycle.handover import Handover
from mcore_rl.controller.lifecycle.messages import stop_explained, warn
from mcore_rl.controller.lifecycle.preemption import Preempted
from mcore_rl.controller.lifecycle.run_checkpoints import complete_checkpoints, how_to_go_on
from mcore_rl.errors import DeadEngineError, DeadWorkerError
from mcore_rl.rollout.pool import EnginePool
from mcore_rl.rollout.protocol import Request, Sample, Sampling
from mcore_rl.runtime.rollout_worker import RayEngine

C = TypeVar("C", RunConfig, SftConfig)
T = TypeVar("T")
ANSWER_S = 30.0  # for an engine that lives to say so
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 60.0
QUIET_S = 0.05  # between looks whether the other engines' samples have ended


class EngineRestarter:
    """Starts the dead of ``engines`` again, ``limit`` of them in the whole run; warn: is told of each."""

    def __init__(
        self, engines: Sequence[RayEngine], pool: EnginePool, limit: int, *, warn: Callable[[str], None]
    ) -> None:
        self._engines, self._pool, self._limit, self._warn = list(engines), pool, limit, warn
        self.num_restarts = 0

    async def restart_dead(self, error: DeadEngineError) -> None:
        """Return when all engines live.  ``error``, of which this is the answer: there were too many deaths.

        One that dies again while it starts is one more death, answered after a pause: what it needs, a node or the
        memory of a device, may take a moment to be there again.
        """
        begun, restarted = time.monotonic(), dict[str, None]()
        for attempt in count():
            alive = await asyncio.gather(*(_is_alive(engine) for engine in self._engines))
            dead = [engine for engine, lives in zip(self._engines, alive, strict=True) if not lives]
            if not dead or self.num_restarts + len(dead) > self._limit:
                raise error
            self.num_restarts += len(dead)
            restarted |= dict.fromkeys(engine.name for engine in dead)
            self._warn(f"{error}\n{', '.join(engine.name for engine in dead)}: started again, {self._left()}")
            await asyncio.sleep(_pause_s(attempt))
            ends = await asyncio.gather(*(engine.restart() for engine in dead), return_exceptions=True)
            for end in ends:
                if isinstance(end, BaseException) and not isinstance(end, DeadEngineError):
                    raise end
            deaths = [end for end in ends if isinstance(end, DeadEngineError)]
            if not deaths:
                break
            error = deaths[0]
        self._pool.forget_deaths()
        self._warn(f"{', '.join(restarted)}: ready after {time.monotonic() - begun:.0f} s")

    def _left(self) -> str:
        return f"{self.num_restarts} of {self._limit} restarts (trainer.max_restarts)"


class RunRestarts:
    """Of a run's training processes: how often it is begun again.  warn: is told of each."""

    def __init__(self, limit: int, directory: Path, *, warn: Callable[[str], None]) -> None:
        self._limit, self._directory, self._warn = limit, directory, warn
        self._count, self._last = 0, ""

    async def answer(self, error: DeadWorkerError, config: C) -> C:
        """Return the configuration with which to begin again, after a pause that grows.

        ``error``: there were too many, or it is the same again and no step further.
        """
        found = complete_checkpoints(self._directory)
        newest = found[-1].name if found else "the beginning"
        this = f"{newest}: {str(error).splitlines()[0]}"
        if self._count == self._limit or this == self._last:
            raise error
        self._count, self._last = self._count + 1, this
        pause_s = _pause_s(self._count)
        again = f"restart {self._count} of {self._limit} (trainer.max_restarts) from {newest} in {pause_s:.0f} s"
        self._warn(f"{error}\n{again}")
        await asyncio.sleep(pause_s)
        if not found:
            return config
        return replace(config, trainer=replace(config.trainer, resume_mode=ResumeMode.auto, resume_from_path=None))


async def run_with_restarts(config: C, attempt: Callable[[C], Awaitable[T]]) -> T:
    """What ``attempt`` gives, which is begun again from the newest checkpoint where a training process dies.

    Preempted: it was told to leave, and has saved; how to go on is added to what it says, and is said at Ctrl-C too.
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


class Rollout:
    """Samples of ``pool``, whatever dies: deaths are ``handover``'s to answer."""

    def __init__(self, pool: EnginePool, handover: Handover) -> None:
        self._pool, self._handover = pool, handover
        self._num_calls = self._num_revivals = 0
        self._reviving = asyncio.Lock()

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Sample]:
        """See ``RolloutEngine.generate``.  DeadEngineError: there were too many deaths."""
        left = {request.key: request for request in requests}
        while left:
            seen = self._num_revivals
            self._num_calls += 1
            try:
                async with aclosing(self._pool.generate(list(left.values()), sampling)) as samples:
                    async for sample in samples:
                        del left[sample.prompt_id, sample.index]
                        yield sample
                continue
            except DeadEngineError as error:
                death = error
            finally:
                self._num_calls -= 1
            await self._revive(death, seen)

    async def _revive(self, death: DeadEngineError, seen: int) -> None:
        """Once, for all calls that the same death ended; engines must not sleep while another call draws."""
        async with self._reviving:
            if self._num_revivals != seen:
                return
            while self._num_calls:
                await asyncio.sleep(QUIET_S)
            await self._handover.revive(death)
            self._num_revivals += 1


async def _is_alive(engine: RayEngine) -> bool:
    try:
        await asyncio.wait_for(engine.version(), ANSWER_S)
    except (DeadEngineError, TimeoutError):
        return False
    return True


def _pause_s(number: int) -> float:
    """Before an attempt that follows ``number`` others; twice as long each time."""
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (number - 1)) if number else 0.0
