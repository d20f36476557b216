"""Several engines behind one queue: the samples of a prompt go to the engine with the least to do.

What an engine has to do is counted in tokens: of the prompts that it was given and has not answered, and of the
responses that are expected of them, which is the mean of those seen so far.  All samples of a prompt go to one engine,
for the prefix cache.  Long prompts are given out first, and an engine is given no more than ``AHEAD`` times what it can
run at once, so that the last prompts go wherever there is room and all engines end at about the same time.

The invariant: which engine draws a sample changes nothing about it (``seed_of``).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mcore_rl.errors import DeadEngineError
from mcore_rl.rollout.protocol import Chunk, Pause, Request, RolloutEngine, Sample, Sampling, Statistics

AHEAD = 1.25  # so that an engine never waits for its next prompt


@dataclass(kw_only=True, eq=False)
class _Place:
    """An engine and what it was given.  costs: of each unfinished request, by its identity.  cause: of its death."""

    engine: RolloutEngine
    costs: dict[int, float] = field(default_factory=dict)
    cause: DeadEngineError | None = None

    @property
    def load(self) -> float:
        """Tokens to come."""
        return sum(self.costs.values())


class EnginePool:
    """A ``RolloutEngine`` of ``engines``; verbs but ``generate``, ``stream`` and ``abort`` go to every one of them.

    max_num_seqs: samples that one engine runs at once.  requeue: what becomes of the samples of an engine that dies.
    False, the default: its death is raised, and the others' samples of that call are aborted.  True: the others draw
    them again, to the same tokens, and the death is raised once no engine is left; weights can no longer be updated,
    because every other verb still raises it.
    """

    def __init__(self, engines: Sequence[RolloutEngine], max_num_seqs: int, *, requeue: bool = False) -> None:
        assert engines, "a pool holds at least one engine"
        self._places = [_Place(engine=engine) for engine in engines]
        self._room = max(1, round(AHEAD * max_num_seqs))
        self._requeue = requeue
        self._waiters: list[asyncio.Future[None]] = []  # for room
        self._num_responses = self._response_tokens = 0

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"pool of {', '.join(place.engine.name for place in self._places)}"

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncGenerator[Sample]:
        """See ``RolloutEngine.generate``."""
        parts: asyncio.Queue[Sample | Exception] = asyncio.Queue()
        groups = sorted(_by_prompt(requests), key=lambda group: len(group) * len(group[0].tokens), reverse=True)
        tasks: set[asyncio.Task[None]] = set()
        dispatcher = asyncio.create_task(self._dispatch(groups, sampling, parts, tasks))
        try:
            for _ in requests:
                part = await parts.get()
                if isinstance(part, Exception):
                    raise part
                yield part
        finally:
            dispatcher.cancel()
            await asyncio.gather(dispatcher, return_exceptions=True)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def forget_deaths(self) -> None:
        """All engines live again, those that died under their old names."""
        for place in self._places:
            place.cause = None

    async def stream(self, request: Request, sampling: Sampling) -> AsyncIterator[Chunk | Sample]:
        """See ``RolloutEngine.stream``; a death is raised, requeue or not, since parts of it were seen already."""
        place = await self._take([request], sampling)
        try:
            async for part in place.engine.stream(request, sampling):
                yield part
        finally:
            self._release(place, [request])

    async def abort(self, keys: Iterable[tuple[str, int]] | None = None) -> None:
        """See ``RolloutEngine.abort``."""
        wanted = None if keys is None else tuple(keys)
        await self._each(lambda engine: engine.abort(wanted))

    async def pause(self, mode: Pause) -> None:
        """See ``RolloutEngine.pause``."""
        await self._each(lambda engine: engine.pause(mode))

    async def resume(self) -> None:
        """See ``RolloutEngine.resume``."""
        await self._each(lambda engine: engine.resume())

    async def sleep(self, level: int = 1) -> None:
        """See ``RolloutEngine.sleep``."""
        await self._each(lambda engine: engine.sleep(level))

    async def wake(self) -> None:
        """See ``RolloutEngine.wake``."""
        await self._each(lambda engine: engine.wake())

    async def version(self) -> int:
        """Of all engines; where they differ, the oldest."""
        return int(min(await self._each(lambda engine: engine.version())))

    async def start_update(self, mode: Pause = Pause.keep) -> None:
        """See ``RolloutEngine.start_update``."""
        await self._each(lambda engine: engine.start_update(mode))

    async def finish_update(self, version: int) -> None:
        """See ``RolloutEngine.finish_update``."""
        await self._each(lambda engine: engine.finish_update(version))

    async def fail_update(self, cause: str) -> None:
        """See ``RolloutEngine.fail_update``."""
        await self._each(lambda engine: engine.fail_update(cause))

    async def rpc(self, method: str, *args: object, timeout_s: float | None = None) -> list[Any]:
        """See ``RolloutEngine.rpc``; the ranks of the first engine, then those of the second, and so on."""
        found = await self._each(lambda engine: engine.rpc(method, *args, timeout_s=timeout_s))
        return [result for results in found for result in results]

    async def reset_prefix_cache(self) -> None:
        """See ``RolloutEngine.reset_prefix_cache``."""
        await self._each(lambda engine: engine.reset_prefix_cache())

    async def statistics(self) -> Statistics:
        """Of all engines together; the KV cache use is the highest, the busy time the longest."""
        each = await self._each(lambda engine: engine.statistics())
        summed = ("running", "waiting", "prompt_tokens", "cached_tokens", "generated_tokens", "preemptions")
        return Statistics(
            **{name: sum(getattr(one, name) for one in each) for name in summed},
            kv_cache_usage=max(one.kv_cache_usage for one in each),
            busy_s=max(one.busy_s for one in each),
        )

    async def shutdown(self) -> None:
        """See ``RolloutEngine.shutdown``."""
        await self._each(lambda engine: engine.shutdown())

    async def _each(self, verb: Callable[[RolloutEngine], Coroutine[Any, Any, Any]]) -> list[Any]:
        """What ``verb`` gives on every engine; the first failure, once all have answered."""
        found = await asyncio.gather(*(verb(place.engine) for place in self._places), return_exceptions=True)
        for result in found:
            if isinstance(result, BaseException):
                raise result
        return found

    async def _dispatch(
        self,
        groups: Sequence[list[Request]],
        sampling: Sampling,
        parts: asyncio.Queue[Sample | Exception],
        tasks: set[asyncio.Task[None]],
    ) -> None:
        """Give every group to an engine, the first group first, as soon as one has room."""
        try:
            for group in groups:
                place = await self._take(group, sampling)
                tasks.add(asyncio.create_task(self._run(place, group, sampling, parts)))
        except Exception as error:  # noqa: BLE001  raised where the parts are read
            parts.put_nowait(error)

    async def _run(
        self, place: _Place, group: list[Request], sampling: Sampling, parts: asyncio.Queue[Sample | Exception]
    ) -> None:
        """Draw ``group`` on ``place``, which was taken for it; should that die, what is left of it elsewhere."""
        left = {request.key: request for request in group}
        while left:
            try:
                async for sample in place.engine.generate(list(left.values()), sampling):
                    self._saw(sample)
                    self._release(place, [left.pop((sample.prompt_id, sample.index))])
                    parts.put_nowait(sample)
            except DeadEngineError as error:
                place.cause = error
                if not self._requeue:
                    parts.put_nowait(error)
                    return
            except Exception as error:  # noqa: BLE001  raised where the parts are read
                parts.put_nowait(error)
                return
            finally:
                self._release(place, left.values())
            if left:
                try:
                    place = await self._take(list(left.values()), sampling)
                except DeadEngineError as error:  # the last one is dead
                    parts.put_nowait(error)
                    return

    async def _take(self, group: Sequence[Request], sampling: Sampling) -> _Place:
        """The engine with the least to do of those that have room for ``group``, once there is one; it now has it."""
        while True:
            dead = [place.cause for place in self._places if place.cause is not None]
            if dead and not (self._requeue and len(dead) < len(self._places)):
                raise DeadEngineError(str(dead[0]))
            open_places = [place for place in self._places if place.cause is None and self._has_room(place, group)]
            if open_places:
                place = min(open_places, key=lambda place: place.load)
                place.costs |= {id(request): self._cost(request, sampling) for request in group}
                return place
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    def _has_room(self, place: _Place, group: Sequence[Request]) -> bool:
        return not place.costs or len(place.costs) + len(group) <= self._room

    def _release(self, place: _Place, requests: Iterable[Request]) -> None:
        for request in requests:
            place.costs.pop(id(request), None)
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    def _saw(self, sample: Sample) -> None:
        self._num_responses += 1
        self._response_tokens += len(sample.tokens)

    def _cost(self, request: Request, sampling: Sampling) -> float:
        """Tokens to come: the prompt's, and of a response as many as those before it had, or may have."""
        expected = self._response_tokens / self._num_responses if self._num_responses else sampling.max_tokens
        return len(request.tokens) + min(expected, sampling.max_tokens)


def _by_prompt(requests: Iterable[Request]) -> list[list[Request]]:
    groups: dict[str, list[Request]] = {}
    for request in requests:
        groups.setdefault(request.prompt.id, []).append(request)
    return list(groups.values())
