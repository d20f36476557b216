"""Several engines behind one queue: the samples of a prompt go to the engine with the least load.

The load of an engine is counted in tokens: of its unfinished prompts, and of their expected responses, whose length is
the mean of those seen so far.  All samples of a prompt go to one engine, for the prefix cache.  Long prompts go first,
and an engine gets at most ``AHEAD`` times what it can run at once, so that the last prompts go wherever there is room
and all engines end at about the same time.

It does not restart engines: ``controller.lifecycle.fault_tolerance`` does.

The invariant: which engine draws a sample changes nothing about it (``seed_of``).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mcore_rl.errors import DeadEngineError
from mcore_rl.rollout.protocol import EngineMemory, Request, RolloutEngine, Sample, Sampling

AHEAD = 1.25  # above 1, so that an engine never waits for its next prompt


@dataclass(kw_only=True, eq=False)
class EngineLoad:
    """An engine and its queue.

    Fields:
        costs: the expected tokens of each unfinished request, by the request's identity.
        death: the error that the engine died with; None while it lives.
    """

    engine: RolloutEngine
    costs: dict[int, float] = field(default_factory=dict)
    death: DeadEngineError | None = None

    @property
    def tokens(self) -> float:
        """The expected tokens of all its unfinished requests."""
        return sum(self.costs.values())


class EnginePool:
    """Generates with ``engines`` as if they were one.

    If an engine dies, the call raises its error and aborts the call's samples on other engines; every later call raises
    the error too, until ``mark_alive``.

    Args:
        engines: at least one.
        max_num_seqs: samples that one engine runs at once.
    """

    def __init__(self, engines: Sequence[RolloutEngine], max_num_seqs: int) -> None:
        assert engines, "a pool holds at least one engine"
        self._loads = [EngineLoad(engine=engine) for engine in engines]
        self._room = max(1, round(AHEAD * max_num_seqs))
        self._waiters: list[asyncio.Future[None]] = []  # for room
        self._num_responses = self._response_tokens = 0

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncGenerator[Sample]:
        """See ``RolloutEngine.generate``."""
        finished: asyncio.Queue[Sample | Exception] = asyncio.Queue()
        groups = sorted(_by_prompt(requests), key=lambda group: len(group) * len(group[0].tokens), reverse=True)
        tasks: set[asyncio.Task[None]] = set()
        dispatcher = asyncio.create_task(self._dispatch(groups, sampling, finished, tasks))
        try:
            for _ in requests:
                sample = await finished.get()
                if isinstance(sample, Exception):
                    raise sample
                yield sample
        finally:
            dispatcher.cancel()
            await asyncio.gather(dispatcher, return_exceptions=True)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def sleep(self, level: int = 1) -> None:
        """See ``RolloutEngine.sleep``; all engines."""
        await self._all(lambda engine: engine.sleep(level))

    async def wake(self, memory: EngineMemory | None = None) -> None:
        """See ``RolloutEngine.wake``; all engines."""
        await self._all(lambda engine: engine.wake(memory))

    def mark_alive(self) -> None:
        """Uses every engine again, after those that died were restarted."""
        for load in self._loads:
            load.death = None

    async def _all(self, verb: Callable[[RolloutEngine], Coroutine[Any, Any, None]]) -> None:
        """Calls ``verb`` of every engine; raises the first failure once all have answered."""
        answers = await asyncio.gather(*(verb(load.engine) for load in self._loads), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer

    async def _dispatch(
        self,
        groups: Sequence[list[Request]],
        sampling: Sampling,
        finished: asyncio.Queue[Sample | Exception],
        tasks: set[asyncio.Task[None]],
    ) -> None:
        """Sends every group, in order, to an engine as soon as one has room."""
        try:
            for group in groups:
                load = await self._take(group, sampling)
                tasks.add(asyncio.create_task(self._run(load, group, sampling, finished)))
        except Exception as error:  # noqa: BLE001  raised where the samples are read
            finished.put_nowait(error)

    async def _run(
        self,
        load: EngineLoad,
        group: Sequence[Request],
        sampling: Sampling,
        finished: asyncio.Queue[Sample | Exception],
    ) -> None:
        """Generates the samples of ``group`` on the engine that ``_take`` chose."""
        unfinished = {request.key: request for request in group}
        try:
            async for sample in load.engine.generate(group, sampling):
                self._num_responses += 1
                self._response_tokens += len(sample.tokens)
                self._release(load, [unfinished.pop((sample.prompt_id, sample.index))])
                finished.put_nowait(sample)
        except Exception as error:  # noqa: BLE001  raised where the samples are read
            if isinstance(error, DeadEngineError):
                load.death = error
            finished.put_nowait(error)
        finally:
            self._release(load, unfinished.values())

    async def _take(self, group: Sequence[Request], sampling: Sampling) -> EngineLoad:
        """Waits until an engine has room; assigns ``group`` to the one with the least load of those that have room."""
        while True:
            death = next((load.death for load in self._loads if load.death is not None), None)
            if death is not None:
                raise DeadEngineError(str(death))
            with_room = [load for load in self._loads if not load.costs or len(load.costs) + len(group) <= self._room]
            if with_room:
                load = min(with_room, key=lambda load: load.tokens)
                load.costs |= {id(request): self._cost(request, sampling) for request in group}
                return load
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    def _release(self, load: EngineLoad, requests: Iterable[Request]) -> None:
        for request in requests:
            load.costs.pop(id(request), None)
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    def _cost(self, request: Request, sampling: Sampling) -> float:
        """The expected tokens of a request: its prompt, and the mean response so far, at first the longest response."""
        expected = self._response_tokens / self._num_responses if self._num_responses else sampling.max_tokens
        return len(request.tokens) + min(expected, sampling.max_tokens)


def _by_prompt(requests: Iterable[Request]) -> list[list[Request]]:
    groups: dict[str, list[Request]] = {}
    for request in requests:
        groups.setdefault(request.prompt.id, []).append(request)
    return list(groups.values())
