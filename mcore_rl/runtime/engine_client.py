"""The controller's client of an engine on a node of the cluster: typed methods, which call a Ray actor.

The invariant: no call waits for ever.  A call with an answer has a time limit, learnt from earlier ones.  Samples and
scores have none, but the engine must make progress while it works: something arrives, or vLLM's scheduler has counted
tokens since it was asked last.  An engine that hangs is killed, so that it can be restarted as one that died.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import ray
from ray.exceptions import RayError

from mcore_rl.config.rollout import ServingConfig
from mcore_rl.config.trainer import WatchdogConfig
from mcore_rl.errors import DeadEngineError, McoreRLError
from mcore_rl.rollout.protocol import Classifier, Request, RolloutEngine, Sample, Sampling
from mcore_rl.rollout.remote_engine import RemoteEngine, Verb
from mcore_rl.runtime.answers import Whereabouts
from mcore_rl.runtime.hung_engine import end_hung_engine
from mcore_rl.runtime.watchdog import Watchdog

P = ParamSpec("P")
T = TypeVar("T")
LOOK_S = 5.0  # between two looks at the progress of an engine that works
CLOSE_S = 60.0  # how long an engine may take to end regularly
WORK = "progress"  # the watchdog's name for the time between two signs of progress
# While an engine is paused it makes no progress.
PAUSES = (RolloutEngine.pause.__name__, RolloutEngine.start_update.__name__)
GOES_ON = (RolloutEngine.resume.__name__, RolloutEngine.finish_update.__name__, RolloutEngine.fail_update.__name__)


class EngineClient(RemoteEngine):
    """A ``RolloutEngine`` or ``Classifier`` whose engine runs under a Ray actor of ``RolloutWorker``.

    new_worker: makes that actor, and a new one for each restart.
    watchdog: says when the engine hangs; None: by the default limits.
    """

    def __init__(self, name: str, new_worker: Callable[[], Any], watchdog: Watchdog | None = None) -> None:
        super().__init__(name)
        self._new_worker = new_worker
        self._worker = new_worker()
        self._watchdog = watchdog or Watchdog(WatchdogConfig())
        self._started: tuple[Any, ...] | None = None
        self._log: Path | None = None
        self._fresh()

    def _fresh(self) -> None:
        """Forgets what was known of the actor that was there before."""
        self._where: Whereabouts | None = None
        self._leader: int | None = None
        self._paused = False
        self._num_working = self._num_arrived = 0
        self._counted: tuple[int, int] | None = None  # tokens of prompts and responses, when it was asked last
        self._silence: asyncio.Task[float] | None = None
        self._end: asyncio.Task[list[str]] | None = None

    async def start(
        self, directory: Path, config: ServingConfig, *, cores: Sequence[int] | None, device_ids: Sequence[str] | None,
        log: Path, awaits_weights: bool = False,
    ) -> None:  # fmt: skip
        """Starts the engine with the weights of ``directory``, or without any; see ``start_engine``."""
        self._log, self._started = log, (directory, config, cores, device_ids, log, awaits_weights)
        await self._start("starting")

    async def restart(self) -> None:
        """Ends the old processes and starts the engine again as ``start`` did; it has no weights of an update."""
        assert self._started is not None, "start the engine first"
        await self.shutdown()
        self._worker = self._new_worker()
        self._fresh()
        await self._start("starting again")

    async def _start(self, doing: str) -> None:
        assert self._started is not None
        self._where = await self._answered(doing, "whereabouts", self._worker.whereabouts.remote())
        await self._answered(doing, "start", self._worker.start.remote(*self._started))
        self._leader = await self._answered(doing, "leader", self._worker.leader.remote())

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncGenerator[Sample]:
        """See ``RolloutEngine.generate``."""
        finishing = self._worker.generate.options(num_returns="streaming").remote(list(requests), sampling)
        unfinished = len(requests)
        try:
            while True:
                doing = f"generating {unfinished} samples"
                sample = await self._at_work(doing, _next_of(finishing))
                if sample is None:
                    break
                unfinished -= 1
                yield sample
        finally:
            if unfinished:
                ray.cancel(finishing)  # aborts the unfinished samples

    async def shutdown(self) -> None:
        """See ``RolloutEngine.shutdown``; also ends the actor."""
        with suppress(RayError, TimeoutError):  # the actor is gone already, or hangs
            await asyncio.wait_for(_value(self._worker.close.remote()), CLOSE_S)
        self.kill()

    def kill(self) -> None:
        """Kills the actor; the engine's processes end with it."""
        ray.kill(self._worker)

    async def _ask(self, doing: str, verb: Verb[P, T], *args: P.args, **options: P.kwargs) -> T:
        name = verb.__name__
        call = self._worker.perform.remote(name, args, options)
        if name == Classifier.classify.__name__:
            scores: T = await self._at_work(doing, _value(call))
            return scores
        if name in PAUSES:
            self._paused = True
        # What a worker is told takes as long as that method does.
        method = getattr(args[0], "__name__", name) if name == RolloutEngine.call_workers.__name__ else name
        answer: T = await self._answered(doing, method, call)
        if name in GOES_ON:
            self._paused = False
        return answer

    async def _answered(self, doing: str, method: str, call: Any) -> Any:
        """Returns the result of a method of ``RolloutWorker``, or raises the error that it returned.

        doing: what the engine was doing, for the message of the DeadEngineError if the actor is gone or hangs.
        method: the watchdog's name of the call.
        """
        begun, limit_s = time.monotonic(), self._watchdog.limit_s(method)
        task = asyncio.ensure_future(_value(call))
        try:
            await asyncio.wait([task], timeout=None if math.isinf(limit_s) else limit_s)
            if not task.done():
                raise await self._hung(doing, f"no answer for {limit_s:.0f} s")
            answer = await self._checked(doing, task)
        finally:
            task.cancel()
        self._watchdog.took(method, time.monotonic() - begun)
        return answer

    async def _at_work(self, doing: str, work: Awaitable[Any]) -> Any:
        """Returns the result of ``work``, samples or scores, or raises its error.

        DeadEngineError: the actor is gone, or the engine makes no progress.
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
                self._watchdog.took(WORK, waited)
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
        asking: asyncio.Future[Any] | None = None
        try:
            while True:
                limit_s = self._watchdog.limit_s(WORK)
                await asyncio.sleep(min(LOOK_S, limit_s / 4))
                counted = self._counted
                if asking is not None and asking.done():
                    if not asking.cancelled() and asking.exception() is None and hasattr(asking.result(), "running"):
                        counted = asking.result().prompt_tokens, asking.result().generated_tokens
                    asking = None
                if asking is None:
                    asking = asyncio.ensure_future(_value(self._worker.perform.remote("statistics", (), {})))
                now = time.monotonic()
                if arrived != self._num_arrived or self._counted not in (None, counted):
                    self._watchdog.took(WORK, now - since)
                    arrived, since = self._num_arrived, now
                elif self._paused:
                    since = now
                self._counted = counted
                if now - since > limit_s:
                    return now - since
        finally:
            if asking is not None:
                asking.cancel()

    async def _hung(self, doing: str, sign: str) -> DeadEngineError:
        """Ends the engine, once for all that wait for it, and returns the error of one of them."""
        what = f"{self._name} hangs while {doing}: {sign} (trainer.watchdog says how long is too long)"
        if self._end is None:
            self._end = asyncio.create_task(self._ended(what))
        return DeadEngineError("\n".join([what, *await asyncio.shield(self._end)]))

    async def _ended(self, what: str) -> list[str]:
        """Ends the engine; returns what its processes were doing, in lines for the screen."""
        lines = await asyncio.to_thread(end_hung_engine, what, self._where, self._leader, self._log)
        self.kill()
        return lines

    async def _checked(self, doing: str, task: asyncio.Future[Any]) -> Any:
        try:
            answer = await task
        except RayError as error:
            await self._raise_if_ended(doing)
            reason = str(error).strip().splitlines()[-1]
            raise DeadEngineError(f"{self._name} died while {doing}: its Ray actor is gone ({reason})") from error
        if isinstance(answer, DeadEngineError):
            await self._raise_if_ended(doing)
        if isinstance(answer, McoreRLError):
            raise answer
        return answer

    async def _raise_if_ended(self, doing: str) -> None:
        """Raises what the engine was ended for, if another call has noticed that it hangs."""
        if self._end is not None:
            raise await self._hung(doing, "no answer")


async def _value(call: Any) -> Any:
    """The result of a call of Ray's, as a coroutine."""
    return await call


async def _next_of(samples: Any) -> Any:
    """The next sample, or error; None at their end."""
    call = await anext(samples, None)
    return None if call is None else await call
