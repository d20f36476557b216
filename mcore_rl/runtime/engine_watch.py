"""Notices an engine that hangs, and ends it, so that it can be restarted as one that died.

The invariant: no call of an engine waits for ever.  A call with an answer has a time limit, learnt from earlier ones.
Samples and scores have none, but the engine must make progress while it works: something arrives, or vLLM's scheduler
has counted tokens since it was asked last.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from mcore_rl.errors import DeadEngineError
from mcore_rl.rollout.protocol import Statistics
from mcore_rl.runtime.hung_engine import EnginePlace, end_hung_engine
from mcore_rl.runtime.watchdog import Watchdog

T = TypeVar("T")
LOOK_S = 5.0  # between two looks at the progress of an engine that works
WORK = "progress"  # the watchdog's name for the time between two signs of progress


class EngineWatch:
    """Watches one engine from its start to its end; a restarted engine has another.

    Args:
        name: the engine's name in messages.
        watchdog: the limits, which it learns too; may be shared with like engines.
        statistics: asks the engine for its counts.
        kill: ends the engine's actors.

    places: where its processes are, as far as that is known.
    paused: it need not make progress, since it was told to pause.
    """

    def __init__(
        self,
        name: str,
        watchdog: Watchdog,
        statistics: Callable[[], Awaitable[object]],
        kill: Callable[[], None],
    ) -> None:
        self.places: Sequence[EnginePlace] = ()
        self.watchdog, self.paused = watchdog, False
        self._name, self._statistics, self._kill = name, statistics, kill
        self._num_working = self._num_arrived = 0
        self._counted: tuple[int, int] | None = None  # tokens of prompts and responses, when it was asked last
        self._silence: asyncio.Task[float] | None = None
        self._end: asyncio.Task[list[str]] | None = None

    async def answered(self, doing: str, method: str, call: Awaitable[T]) -> T:
        """Returns the result of ``call``, or raises its error.

        doing: what the engine is doing, for messages.  method: the watchdog's name of the call.
        DeadEngineError: it took too long, and the engine was killed.
        """
        begun, limit_s = time.monotonic(), self.watchdog.limit_s(method)
        task = asyncio.ensure_future(call)
        try:
            await asyncio.wait([task], timeout=None if math.isinf(limit_s) else limit_s)
            if not task.done():
                raise await self._hung(doing, f"no answer for {limit_s:.0f} s")
            answer = await self._checked(doing, task)
        finally:
            task.cancel()
        self.watchdog.took(method, time.monotonic() - begun)
        return answer

    async def at_work(self, doing: str, work: Awaitable[T]) -> T:
        """Returns the result of ``work``, samples or scores, or raises its error.

        DeadEngineError: the engine made no progress for too long, and was killed.
        """
        begun, task = time.monotonic(), asyncio.ensure_future(work)
        self._num_working += 1
        if self._silence is None or self._silence.done():
            self._silence = asyncio.create_task(self._silent())
        silence = self._silence
        try:
            await asyncio.wait([task, silence], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise await self._hung(doing, f"no progress for {silence.result():.0f} s")
            answer = await self._checked(doing, task)
            self._num_arrived += 1
            if (waited := time.monotonic() - begun) < LOOK_S:  # what takes longer is looked at on the way
                self.watchdog.took(WORK, waited)
            return answer
        finally:
            task.cancel()
            self._num_working -= 1
            if not self._num_working:
                silence.cancel()
                self._silence = None

    async def _silent(self) -> float:
        """Returns once the engine has made no progress for too long, after how many seconds; learns how long it takes.

        Its scheduler's counts change only where vLLM's own loop runs, unlike an answer of a thread beside it.
        """
        arrived, since = self._num_arrived, time.monotonic()
        asking: asyncio.Future[object] | None = None
        try:
            while True:
                limit_s = self.watchdog.limit_s(WORK)
                await asyncio.sleep(min(LOOK_S, limit_s / 4))
                counted = self._counted
                if asking is not None and asking.done():
                    if not asking.cancelled() and asking.exception() is None:
                        answer = asking.result()
                        if isinstance(answer, Statistics):
                            counted = answer.prompt_tokens, answer.generated_tokens
                    asking = None
                if asking is None:
                    asking = asyncio.ensure_future(self._statistics())
                now = time.monotonic()
                if arrived != self._num_arrived or self._counted not in (None, counted):
                    self.watchdog.took(WORK, now - since)
                    arrived, since = self._num_arrived, now
                elif self.paused:
                    since = now
                self._counted = counted
                if now - since > limit_s:
                    return now - since
        finally:
            if asking is not None:
                asking.cancel()

    async def _checked(self, doing: str, task: asyncio.Future[T]) -> T:
        try:
            return await task
        except DeadEngineError as error:
            if self._end is None:
                raise
            raise await self._hung(doing, "no answer") from error  # another call has noticed

    async def _hung(self, doing: str, sign: str) -> DeadEngineError:
        """Ends the engine, once for all that wait for it, and returns the error of one of them."""
        what = f"{self._name} hangs while {doing}: {sign} (trainer.watchdog says how long is too long)"
        if self._end is None:
            self._end = asyncio.create_task(self._ended(what))
        return DeadEngineError("\n".join([what, *await asyncio.shield(self._end)]))

    async def _ended(self, what: str) -> list[str]:
        """Ends the engine; returns what its processes were doing, in lines for the screen."""
        lines = await asyncio.to_thread(end_hung_engine, what, self.places)
        self._kill()
        return lines
