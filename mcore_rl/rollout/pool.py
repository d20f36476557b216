"""Several engines behind one queue: requests go where their prefix is cached, or to the engine with the least load.

The load of an engine is counted in tokens: of its unfinished prompts, and of their expected responses, whose length is
the mean of those seen so far.  A turn goes to the engine of the turn before, a first turn to that of another sample of
its prompt, unless that engine has no room or is too busy (``_allowed``).  All samples of a prompt that one call asks
for go to one engine.  Where engines are full, a turn whose own engine has room overtakes others, as
far as ``PATIENCE`` allows.  Long prompts go first, and an engine gets at most ``AHEAD`` times what it can run at once,
so that the last prompts go wherever there is room and all engines end at about the same time.

Engines may join and leave (``add``, ``retire``).  It does not restart engines: ``controller.lifecycle.fault_tolerance``
does.

The invariants: which engine draws a sample changes nothing about it (``seed_of``).  While engines receive weights no
request is sent to them (``held``).  A sample that an engine gave up is sent again with the tokens that it has; callers
see one with finish ``abort`` only from ``interrupt``.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from mcore_rl.ground.errors import DeadEngineError, WeightsIncompleteError
from mcore_rl.rollout.episodes import FinishReason
from mcore_rl.rollout.protocol import EngineMemory, Pause, Request, RolloutEngine, Sample, Sampling, aborted

AHEAD = 1.25  # above 1, so that an engine never waits for its next prompt
# An engine that has the prefix may be this share of its seats busier than the least busy.  Its requests are drawn
# together, so that the difference costs little.  It must exceed chance: where tools take half of a session's time, 256
# sessions of each of 8 engines differ by 23 requests from the busiest to the least busy, which is a share of 0.09.
STAYS = 0.25
PATIENCE = 8  # times the engines: by so many a request is overtaken while its own engine, one of them, is full
REMEMBERED = 2**17  # conversations and prompts: more than a step has, 20 MB
SETTLE_S = 0.01  # for an engine to end aborted samples, or to be given a request that is on its way


@dataclass(kw_only=True, eq=False)
class EngineLoad:
    """An engine and its queue.

    Fields:
        costs: the expected tokens of each unfinished request, by the request's identity.
        death: the error that the engine died with; None while it lives.
        has_weights: it can draw; one that was restarted, or that joins, can once it has received weights.
        leaves: it gets nothing more to draw.
    """

    engine: RolloutEngine
    costs: dict[int, float] = field(default_factory=dict)
    death: DeadEngineError | None = None
    has_weights: bool = True
    leaves: bool = False

    @property
    def draws(self) -> bool:
        """Whether it may be given requests."""
        return self.death is None and self.has_weights and not self.leaves

    @property
    def tokens(self) -> float:
        """The expected tokens of all its unfinished requests."""
        return sum(self.costs.values())


@dataclass(kw_only=True, eq=False)
class _Waiter:
    """A group of requests that waits for an engine.

    load: the engine, or None where the group is given back.  num_holds: how often requests had been held back then.
    num_overtaken: how many others overtook it while it was the first.
    """

    group: Sequence[Request]
    max_tokens: int
    load: asyncio.Future[EngineLoad | None]
    num_holds: int = 0
    num_overtaken: int = 0


class _Homes:
    """Which engine drew the last turn of each conversation, and the last first turn of each prompt."""

    def __init__(self) -> None:
        self._loads = OrderedDict[tuple[str, int] | str, EngineLoad]()  # the oldest first

    def of(self, request: Request) -> EngineLoad | None:
        """The engine that has the longest prefix of ``request``; None: nobody drew any of it."""
        opening = request.prompt.opening or request.prompt.id
        return self._loads.get((opening, request.index)) or self._loads.get(opening)

    def remember(self, request: Request, load: EngineLoad) -> None:
        """Notes that ``load`` gets ``request``."""
        opening = request.prompt.opening or request.prompt.id
        keys: list[tuple[str, int] | str] = [(opening, request.index)]
        if request.prompt.id == opening:
            keys.append(opening)
        for key in keys:
            self._loads[key] = load
            self._loads.move_to_end(key)
        while len(self._loads) > REMEMBERED:
            self._loads.popitem(last=False)


class PrefixHits:
    """Counts the tokens that engines had to process before they drew, and those of them that were cached."""

    def __init__(self) -> None:
        self._tokens = 0
        self._cached = 0

    def add(self, request: Request, sample: Sample) -> None:
        """Counts ``sample``, the answer to ``request``, if the engine drew any of it."""
        if len(sample.tokens) > request.num_done:
            self._tokens += len(request.tokens)
            self._cached += sample.cached_tokens

    def take(self) -> dict[str, float]:
        """The metric of what was drawn since the last call; {} if nothing was."""
        tokens = self._tokens
        cached = self._cached
        self._tokens = self._cached = 0
        return {"rollout/prefix_hit_share": cached / tokens} if tokens else {}


class EnginePool:
    """Generates with ``engines`` as if they were one.

    If an engine dies, the call raises its error and aborts the call's samples on other engines; every later call raises
    the error too, until ``mark_alive``.  A restarted engine draws after the next update (``held``).

    Args:
        engines: at least one.
        max_num_seqs: samples that one engine runs at once.
        goes_on: while an engine lives, those that died are no error: the others draw what they had not finished.
        fixed: their weights are on the disk, so that nothing is sent to one that was restarted.

    hits: of the engines' prefix caches.
    """

    def __init__(
        self, engines: Sequence[RolloutEngine], max_num_seqs: int, *, goes_on: bool = False, fixed: bool = False
    ) -> None:
        assert engines, "a pool holds at least one engine"
        self.hits = PrefixHits()
        self._loads = [EngineLoad(engine=engine) for engine in engines]
        self._homes = _Homes()
        self._room = max(1, round(AHEAD * max_num_seqs))
        self._goes_on = goes_on
        self._fixed = fixed
        self._stays = STAYS * max_num_seqs
        self._waiters: deque[_Waiter] = deque()  # in the order in which they get room
        self._held = self._interrupts = 0  # who holds requests back, and who gives them back, now
        self._num_holds = 0  # in all
        self._num_responses = self._response_tokens = 0

    @property
    def death(self) -> DeadEngineError | None:
        """What the first of the dead engines died of, those that leave aside; None: all live."""
        return next((load.death for load in self._loads if load.death is not None and not load.leaves), None)

    @property
    def loads(self) -> Sequence[EngineLoad]:
        """Every engine, with what it has to do now."""
        return self._loads

    @property
    def num_unfinished(self) -> int:
        """The requests that engines have, now."""
        return sum(len(load.costs) for load in self._loads)

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncGenerator[Sample]:
        """See ``RolloutEngine.generate``."""
        finished: asyncio.Queue[Sample | Exception] = asyncio.Queue()
        groups = sorted(_by_prompt(requests), key=lambda group: len(group) * len(group[0].tokens), reverse=True)
        tasks = [asyncio.create_task(self._finish(group, sampling, finished)) for group in groups]
        try:
            for _ in requests:
                sample = await finished.get()
                if isinstance(sample, Exception):
                    raise sample
                yield sample
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def classify(self, tokens: Sequence[int]) -> float | str:
        """Returns the score of one text, or vLLM's message if it has none; raises what the engine raises.

        The engine with the fewest tokens left to read reads it.
        """
        load = min(self._loads, key=lambda each: each.tokens)
        text = object()
        load.costs[id(text)] = len(tokens)
        try:
            (score,) = await load.engine.classify([tokens])
        finally:
            del load.costs[id(text)]
        return score

    @asynccontextmanager
    async def held(self, mode: Pause = Pause.keep) -> AsyncIterator[None]:
        """Within: no request is sent to an engine, since weights are; those that come wait.

        mode: what happens first to the requests that engines have.  keep: nothing, ``RolloutEngine.start_update``
        freezes them.  wait: they are finished.  abort: as ``interrupt``, which also gives back those that wait.
        """
        self._held += 1
        self._num_holds += 1
        try:
            if mode is Pause.abort:
                await self.interrupt()
            while mode is Pause.wait and self.num_unfinished:
                await asyncio.sleep(SETTLE_S)
            yield
            for load in self._loads:
                load.has_weights = True
            self._homes = _Homes()  # an update empties the engines' prefix caches
        finally:
            self._held -= 1
            self._assign()

    async def interrupt(self) -> None:
        """Ends every call of ``generate`` with what there is; returns when no engine has a request.

        Samples under way end with finish ``abort``, and the tokens that they have; so do requests that no engine has
        begun, with those of ``Request.so_far``, or without any.  ``so_far`` of another request goes on from such a
        sample.  An engine that died keeps nobody waiting.
        """
        self._interrupts += 1
        try:
            for waiter in self._waiters:
                if not waiter.load.done():
                    waiter.load.set_result(None)
            self._waiters.clear()
            while self.num_unfinished:  # one that was on its way to its engine could not be aborted yet
                alive = [load.engine for load in self._loads if load.death is None and load.costs]
                await asyncio.gather(*(engine.abort() for engine in alive), return_exceptions=True)
                await asyncio.sleep(SETTLE_S)
        finally:
            self._interrupts -= 1

    async def sleep(self, level: int = 1) -> None:
        """See ``RolloutEngine.sleep``; all engines."""
        await self._all(lambda engine: engine.sleep(level))

    async def wake(self, memory: EngineMemory | None = None) -> None:
        """See ``RolloutEngine.wake``; all engines."""
        await self._all(lambda engine: engine.wake(memory))

    def mark_alive(self) -> None:
        """Says that the engines that died were restarted: each draws again once it has weights."""
        # New loads: who still waits for the dead process of an engine must not say that the new one died.
        self._loads = [
            load if load.death is None or load.leaves else EngineLoad(engine=load.engine, has_weights=self._fixed)
            for load in self._loads
        ]
        self._assign()

    def add(self, engine: RolloutEngine) -> None:
        """Takes an engine that has no weights: it draws after the next update (``held``)."""
        self._loads.append(EngineLoad(engine=engine, has_weights=False))

    def retire(self, engine: RolloutEngine) -> None:
        """Gives ``engine`` nothing more to draw; ``drain`` lets it go."""
        self._load_of(engine).leaves = True

    async def drain(self, engine: RolloutEngine) -> int:
        """Lets a retired engine go; returns how many unfinished samples others draw to their ends.

        They go on from the tokens that they have; where the engine dies meanwhile, from those that it was sent.
        """
        load = self._load_of(engine)
        num_unfinished = len(load.costs)
        while load.costs:  # a request that is on its way to the engine cannot be aborted yet
            if load.death is None:
                with suppress(DeadEngineError):
                    await engine.abort()
            await asyncio.sleep(SETTLE_S)
        self._loads.remove(load)
        self._assign()
        return num_unfinished

    def _load_of(self, engine: RolloutEngine) -> EngineLoad:
        return next(load for load in self._loads if load.engine is engine)

    async def _all(self, verb: Callable[[RolloutEngine], Coroutine[Any, Any, None]]) -> None:
        """Calls ``verb`` of every engine; raises the first failure once all have answered."""
        answers = await asyncio.gather(*(verb(load.engine) for load in self._loads), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer

    async def _finish(
        self, group: Sequence[Request], sampling: Sampling, finished: asyncio.Queue[Sample | Exception]
    ) -> None:
        """Puts every sample of ``group`` into ``finished``, or the error that ends the call."""
        try:
            while group:
                taken = await self._take(group, sampling)
                if taken is None:
                    for request in group:
                        finished.put_nowait(aborted(request))
                    return
                load, num_holds = taken
                group = await self._run(load, num_holds, group, sampling, finished)
        except Exception as error:  # noqa: BLE001  raised where the samples are read
            finished.put_nowait(error)

    async def _run(
        self,
        load: EngineLoad,
        num_holds: int,
        group: Sequence[Request],
        sampling: Sampling,
        finished: asyncio.Queue[Sample | Exception],
    ) -> list[Request]:
        """Generates the samples of ``group`` on the engine that ``_take`` chose; returns what is to be sent again."""
        unfinished = {request.key: request for request in group}
        again = list[Request]()
        try:
            async for sample in load.engine.generate(group, sampling):
                request = unfinished.pop((sample.prompt_id, sample.index))
                self._release(load, [request])
                self.hits.add(request, sample)
                if sample.finish is FinishReason.abort and not self._interrupts:  # a failed update ended it
                    again.append(replace(request, so_far=sample))
                    continue
                self._num_responses += 1
                self._response_tokens += len(sample.tokens)
                finished.put_nowait(sample)
            return again
        except WeightsIncompleteError:
            if num_holds == self._num_holds:
                raise  # nobody updates its weights
        except DeadEngineError as error:
            load.death = error
            if not self._goes_on or self._ends_calls:
                raise
        finally:
            self._release(load, unfinished.values())
        return [*again, *unfinished.values()]

    async def _take(self, group: Sequence[Request], sampling: Sampling) -> tuple[EngineLoad, int] | None:
        """Waits until an engine is chosen for ``group`` (``_next``).

        Returns it with ``_Waiter.num_holds``: a request that an update overtakes on its way was sent before that
        update.  None: the group is to be given back.  Raises DeadEngineError if no more is drawn.
        """
        if self._interrupts:
            return None
        future: asyncio.Future[EngineLoad | None] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(group=group, max_tokens=sampling.max_tokens, load=future)
        self._waiters.append(waiter)
        self._assign()
        try:
            load = await future
            return None if load is None else (load, waiter.num_holds)
        except asyncio.CancelledError:
            if not future.cancelled() and future.exception() is None and (load := future.result()) is not None:
                self._release(load, group)
            self._assign()  # the next may have the room that this one waited for
            raise

    def _assign(self) -> None:
        """Gives room to those who wait, as far as there is room: each is woken once."""
        while self._waiters:
            waiter = self._waiters[0]
            if waiter.load.done():  # its call was cancelled
                self._waiters.popleft()
            elif self._ends_calls:
                self._waiters.popleft().load.set_exception(DeadEngineError(str(self.death)))
            elif self._held or (chosen := self._next()) is None:
                return
            else:
                waiter, load = chosen
                self._waiters.remove(waiter)
                waiter.num_holds = self._num_holds
                load.costs |= {id(request): self._cost(request, waiter.max_tokens) for request in waiter.group}
                for request in waiter.group:
                    self._homes.remember(request, load)
                waiter.load.set_result(load)

    def _next(self) -> tuple[_Waiter, EngineLoad] | None:
        """Who gets room now, and where: the first whose own engine can take it, else the first of all.

        None: there is no room.
        """
        tokens = {load: load.tokens for load in self._with_room(1)}
        if not tokens:
            return None
        first = self._waiters[0]
        patience = PATIENCE * len(self._loads)
        overtaking = patience if first.num_overtaken < patience else 1
        for waiter in islice(self._waiters, overtaking):
            if not waiter.load.done() and (home := self._home(waiter, tokens)) is not None:
                first.num_overtaken += waiter is not first
                return waiter, home
        with_room = self._with_room(len(first.group))
        return (first, min(with_room, key=lambda load: tokens[load])) if with_room else None

    def _home(self, waiter: _Waiter, tokens: Mapping[EngineLoad, float]) -> EngineLoad | None:
        """The engine that has the prefix, if it has room and is not too busy.  tokens: of each with room for one."""
        request = waiter.group[0]
        count = len(waiter.group)
        home = self._homes.of(request)
        if home is None or home not in tokens or not self._has_room(home, count):
            return None
        return home if tokens[home] <= min(tokens.values()) + self._allowed(request, waiter.max_tokens) else None

    def _allowed(self, request: Request, max_tokens: int) -> float:
        """By how many tokens the engine that has its prefix may be busier than the least busy to get ``request``.

        A later turn: see ``STAYS``.  A first turn saves only its prompt: it goes there if the requests ahead are
        expected to draw no more tokens than the prompt has.
        """
        cost = self._cost(request, max_tokens)
        if request.prompt.opening in ("", request.prompt.id):
            return cost * min(self._stays, len(request.tokens) / max(1.0, cost - len(request.tokens)))
        return cost * self._stays

    @property
    def _ends_calls(self) -> bool:
        """Whether so many engines died that nothing more is drawn."""
        dead = [load.death is not None for load in self._loads if not load.leaves]
        return all(dead) if self._goes_on else any(dead)

    def _with_room(self, count: int) -> list[EngineLoad]:
        """The engines that can draw, and have room for so many more samples."""
        return [load for load in self._loads if load.draws and self._has_room(load, count)]

    def _has_room(self, load: EngineLoad, count: int) -> bool:
        return not load.costs or len(load.costs) + count <= self._room

    def _release(self, load: EngineLoad, requests: Iterable[Request]) -> None:
        for request in requests:
            load.costs.pop(id(request), None)
        self._assign()

    def _cost(self, request: Request, max_tokens: int) -> float:
        """The expected tokens of a request: its prompt, and the mean response so far, at first the longest response."""
        expected = self._response_tokens / self._num_responses if self._num_responses else max_tokens
        return len(request.tokens) + min(expected, max_tokens)


def _by_prompt(requests: Iterable[Request]) -> list[list[Request]]:
    groups: dict[str, list[Request]] = {}
    for request in requests:
        groups.setdefault(request.prompt.id, []).append(request)
    return list(groups.values())
