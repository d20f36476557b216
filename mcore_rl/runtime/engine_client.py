"""The controller's client of an engine on one or more nodes of the cluster: typed methods, which call a Ray actor.

The invariant: no call waits for ever (``engine_watch``).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import ray
from ray.exceptions import RayError

from mcore_rl.config.trainer import WatchdogConfig
from mcore_rl.ground.errors import DeadEngineError, McoreRLError
from mcore_rl.parallel.device import num_cores
from mcore_rl.rollout.protocol import EnginePart, Request, RolloutEngine, Sample, Sampling
from mcore_rl.rollout.remote_engine import RemoteEngine, Verb
from mcore_rl.rollout.served import Served
from mcore_rl.rollout.vllm.engine.engine_node import ONE_NODE, EngineNode
from mcore_rl.rollout.vllm.worker_methods import WeightReceiverMethods
from mcore_rl.runtime.engine_watch import EnginePlace, EngineWatch
from mcore_rl.runtime.watchdog import Watchdog
from mcore_rl.tracking.lanes import Lane, State

P = ParamSpec("P")
T = TypeVar("T")

CLOSE_S = 60.0  # how long an engine may take to end regularly
# Between them an engine makes no progress.
PAUSES = (RolloutEngine.pause.__name__, RolloutEngine.start_update.__name__)
GOES_ON = (RolloutEngine.resume.__name__, RolloutEngine.finish_update.__name__, RolloutEngine.fail_update.__name__)
RECEIVES = WeightReceiverMethods.sync_receive.__name__
PICTURES = ThreadPoolExecutor(num_cores(), thread_name_prefix="pictures")  # of all engines; threads begin when used
PEERS_S = 5.0  # how long the death of one part of an engine may take to be known after that of another


@dataclass(frozen=True)
class PartSpec:
    """What an engine has on one node.

    new_worker: makes the Ray actor of ``RolloutWorker`` that runs it, and a new one for each restart.
    log: the file for the output of its processes.
    cores, device_ids: see ``start_engine``.
    """

    new_worker: Callable[[], Any]
    log: Path
    cores: Sequence[int] | None = None
    device_ids: Sequence[str] | None = None


class EngineClient(RemoteEngine):
    """A ``RolloutEngine`` whose engine runs under a Ray actor on each of its nodes.

    The actor on the first node has the engine and answers; the others only have their share of its workers.  The death
    of any part is the engine's.

    parts: one per node.
    watchdog: says when the engine hangs; None: by the default limits.
    lane: what the engine does, from the calls that it is sent.
    """

    def __init__(self, name: str, parts: Sequence[PartSpec], watchdog: Watchdog | None = None) -> None:
        super().__init__(name)
        self._watchdog = watchdog or Watchdog(WatchdogConfig())
        self._parts = list(parts)
        self._workers = [part.new_worker() for part in parts]
        self._ends: list[asyncio.Task[DeadEngineError]] = []  # of the parts that do not answer
        self._served: Served | None = None
        self.lane = Lane(name)
        self.hang_watch = self._new_watch()

    def _new_watch(self) -> EngineWatch:
        worker = self._workers[0]
        return EngineWatch(
            self._name, self._watchdog, lambda: _value(worker.perform.remote("statistics", (), {})), self.kill
        )

    async def start(self, served: Served) -> None:
        """Starts the engine, one of those of ``served``."""
        self._served = served
        await self._start("starting")

    async def restart(self) -> None:
        """Ends the old processes and starts the engine again as ``start`` did; it has no weights of an update."""
        assert self._served is not None, "start the engine first"
        self.lane.clear()
        with self.lane.within(State.restarting):
            await self.shutdown()
            self._workers = [part.new_worker() for part in self._parts]
            self.hang_watch = self._new_watch()
            await self._start("starting again")

    async def _start(self, doing: str) -> None:
        """Starts all parts, which wait for one another; raises the error of the first that fails."""
        actors = [await self._answered(doing, "whereabouts", worker.whereabouts.remote()) for worker in self._workers]
        parts = list(zip(actors, self._parts, strict=True))
        self.hang_watch.places = [EnginePlace(actor, None, part.log) for actor, part in parts]
        nodes = await self._nodes(doing)
        calls = [
            worker.start.remote(self._served, part.cores, part.device_ids, part.log, node)
            for worker, part, node in zip(self._workers, self._parts, nodes, strict=True)
        ]
        starting = [asyncio.ensure_future(self._answered(doing, "start", call)) for call in calls]
        try:
            for started in asyncio.as_completed(starting):
                await started
        finally:
            for each in starting:
                each.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
        leaders = [await self._answered(doing, "leader", worker.leader.remote()) for worker in self._workers]
        self.hang_watch.places = [
            EnginePlace(actor, leader, part.log) for leader, (actor, part) in zip(leaders, parts, strict=True)
        ]
        self._ends = [asyncio.ensure_future(self._end(worker)) for worker in self._workers[1:]]

    async def _nodes(self, doing: str) -> list[EngineNode]:
        """What each part must know of its node and of the others."""
        count = len(self._workers)
        if count == 1:
            return [ONE_NODE]
        meeting = await self._answered(doing, "meeting", self._workers[0].meeting.remote())
        addresses = [await self._answered(doing, "address", worker.address.remote()) for worker in self._workers]
        return [
            EngineNode(nnodes=count, node_rank=rank, address=address, meeting=meeting)
            for rank, address in enumerate(addresses)
        ]

    async def _end(self, worker: Any) -> DeadEngineError:
        """Waits until the part of ``worker`` dies; returns what it died of."""
        try:
            await _answer_of(worker.perform.remote(EnginePart.watch.__name__, (), {}), self._name, "serving")
        except DeadEngineError as death:
            return death
        raise AssertionError("a part that is watched does not answer")

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncGenerator[Sample]:
        """See ``RolloutEngine.generate``."""
        asked = await _in_store(requests)
        finishing = self._workers[0].generate.options(num_returns="streaming").remote(asked, sampling)
        unfinished = len(requests)
        drawing = object()
        self.lane.begin(State.drawing, drawing)
        try:
            while True:
                doing = f"generating {unfinished} samples"
                sample = await self.hang_watch.at_work(doing, self._from_parts(doing, _next_of(finishing)))
                if sample is None:
                    break
                unfinished -= 1
                yield sample
        finally:
            self.lane.end(State.drawing, drawing)
            if unfinished:
                ray.cancel(finishing)  # aborts the unfinished samples

    async def shutdown(self) -> None:
        """See ``RolloutEngine.shutdown``; also ends the actors."""
        self._forget_ends()
        closing = [_closed(worker) for worker in self._workers]
        await asyncio.gather(*closing)
        self.kill()

    def kill(self) -> None:
        """Kills the actors; the engine's processes end with them."""
        self._forget_ends()
        for worker in self._workers:
            ray.kill(worker)

    def _forget_ends(self) -> None:
        for end in self._ends:
            end.cancel()
        self._ends = []

    async def _ask(self, doing: str, verb: Verb[P, T], *args: P.args, **options: P.kwargs) -> T:
        name = verb.__name__
        call = self._workers[0].perform.remote(name, args, options)
        if name == RolloutEngine.classify.__name__:
            scores: T = await self.hang_watch.at_work(doing, self._from_parts(doing, _value(call)))
            return scores
        if name in PAUSES:
            self.hang_watch.paused = True
            self.lane.begin(State.paused, self)
        # What a worker is told takes as long as that method does.
        method = args[0].__name__ if name == RolloutEngine.call_workers.__name__ else name  # type: ignore[attr-defined]
        with self.lane.within(State.updating) if method == RECEIVES else nullcontext():
            answer: T = await self._answered(doing, method, call)
        if name in GOES_ON:
            self.hang_watch.paused = False
            self.lane.end(State.paused, self)
        return answer

    async def _answered(self, doing: str, method: str, call: Any) -> Any:
        """As ``_from_parts``, within the time that the watchdog gives ``method``."""
        return await self.hang_watch.answered(doing, method, self._from_parts(doing, _value(call)))

    async def _from_parts(self, doing: str, call: Awaitable[Any]) -> Any:
        """Returns the result of a method of ``RolloutWorker``, or raises the error that it returned.

        doing: what the engine was doing, for the message of the DeadEngineError if an actor or a part is gone.
        """
        answer = asyncio.ensure_future(_answer_of(call, self._name, doing))
        try:
            await asyncio.wait([answer, *self._ends], return_when=asyncio.FIRST_COMPLETED)
            if answer.done() and isinstance(answer.exception(), DeadEngineError) and self._ends:
                # Its peers may be what it died of: they say so within moments.
                await asyncio.wait(self._ends, timeout=PEERS_S, return_when=asyncio.FIRST_COMPLETED)
            for end in self._ends:
                if end.done():
                    raise DeadEngineError(f"{self._name} died while {doing}: {end.result()}")
            return answer.result()
        finally:
            answer.cancel()


async def _in_store(requests: Sequence[Request]) -> Any:
    """``requests`` as an argument of Ray's.

    Prompts with pictures are put into its store in a thread: pickling decodes them, for 30 ms a megapixel.  asyncio's
    own threads wait for trainers and tools, and have no time for that.
    """
    asked = list(requests)
    if not any(each.prompt.pictures for each in asked):
        return asked
    return await asyncio.get_running_loop().run_in_executor(PICTURES, ray.put, asked)


async def _answer_of(call: Any, name: str, doing: str) -> Any:
    try:
        answer = await call
    except RayError as error:
        reason = str(error).strip().splitlines()[-1]
        raise DeadEngineError(f"{name} died while {doing}: its Ray actor is gone ({reason})") from error
    if isinstance(answer, McoreRLError):
        raise answer
    return answer


async def _closed(worker: Any) -> None:
    with suppress(RayError, TimeoutError):  # the actor is gone already, or hangs
        await asyncio.wait_for(_value(worker.close.remote()), CLOSE_S)


async def _value(call: Any) -> Any:
    """The result of a call of Ray's, as a coroutine."""
    return await call


async def _next_of(samples: Any) -> Any:
    """The next sample, or error; None at their end."""
    call = await anext(samples, None)
    return None if call is None else await call
