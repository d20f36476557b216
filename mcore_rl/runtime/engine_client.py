"""The controller's client of an engine on one or more nodes of the cluster: typed methods, which call a Ray actor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import ray
from ray.exceptions import RayError

from mcore_rl.config.rollout import ServingConfig
from mcore_rl.errors import DeadEngineError, McoreRLError
from mcore_rl.rollout.engine.engine_node import ONE_NODE, EngineNode
from mcore_rl.rollout.protocol import EnginePart, Request, Sample, Sampling
from mcore_rl.rollout.remote_engine import RemoteEngine, Verb

P = ParamSpec("P")
T = TypeVar("T")

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
    """A ``RolloutEngine`` or ``Classifier`` whose engine runs under a Ray actor on each of its nodes.

    The actor on the first node has the engine and answers; the others only have their share of its workers.  The death
    of any part is the engine's.

    parts: one per node.
    """

    def __init__(self, name: str, parts: Sequence[PartSpec]) -> None:
        super().__init__(name)
        self._parts = list(parts)
        self._workers = [part.new_worker() for part in parts]
        self._ends: list[asyncio.Task[DeadEngineError]] = []  # of the parts that do not answer
        self._started: tuple[Any, ...] | None = None

    async def start(self, directory: Path, config: ServingConfig, *, awaits_weights: bool = False) -> None:
        """Starts the engine with the weights of ``directory``, or without any; see ``start_engine``."""
        self._started = (directory, config, awaits_weights)
        await self._start("starting")

    async def restart(self) -> None:
        """Ends the old processes and starts the engine again as ``start`` did; it has no weights of an update."""
        assert self._started is not None, "start the engine first"
        await self.shutdown()
        self._workers = [part.new_worker() for part in self._parts]
        await self._start("starting again")

    async def _start(self, doing: str) -> None:
        """Starts all parts, which wait for one another; raises the error of the first that fails."""
        assert self._started is not None
        directory, config, awaits_weights = self._started
        nodes = await self._nodes(doing)
        calls = [
            worker.start.remote(directory, config, part.cores, part.device_ids, part.log, awaits_weights, node)
            for worker, part, node in zip(self._workers, self._parts, nodes, strict=True)
        ]
        starting = [asyncio.ensure_future(self._answered(doing, call)) for call in calls]
        try:
            for started in asyncio.as_completed(starting):
                await started
        finally:
            for each in starting:
                each.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
        self._ends = [asyncio.ensure_future(self._end(worker)) for worker in self._workers[1:]]

    async def _nodes(self, doing: str) -> list[EngineNode]:
        """What each part must know of its node and of the others."""
        count = len(self._workers)
        if count == 1:
            return [ONE_NODE]
        meeting = await self._answered(doing, self._workers[0].meeting.remote())
        addresses = [await self._answered(doing, worker.address.remote()) for worker in self._workers]
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
        finishing = self._workers[0].generate.options(num_returns="streaming").remote(list(requests), sampling)
        unfinished = len(requests)
        try:
            async for call in finishing:
                sample = await self._answered(f"generating {unfinished} samples", call)
                unfinished -= 1
                yield sample
        finally:
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
        answer: T = await self._answered(doing, self._workers[0].perform.remote(verb.__name__, args, options))
        return answer

    async def _answered(self, doing: str, call: Any) -> Any:
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
    with suppress(RayError):  # the actor is gone already
        await worker.close.remote()
