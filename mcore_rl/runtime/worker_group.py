"""Calls the workers of one role together: ``all`` calls each, ``map`` also sends each data-parallel rank its batches.

A call names the method of the worker's class itself (``group.all(TrainWorker.build)``), so that its arguments and
results are type-checked; only this file turns it into a call of Ray.  The tensor, pipeline and context peers of a
data-parallel coordinate receive the same object references: a shard is in Ray's store once, and peers read it there.

The invariant: a call returns the results of all, or raises the first cause within seconds, with rank, coordinates, host
and phase.  After that the group cannot be used any more and must be closed.
"""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Concatenate, Generic, NoReturn, ParamSpec, TypeVar

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import OutOfMemoryError, RayError

from mcore_rl.ground.errors import DeadWorkerError, WorkerError
from mcore_rl.parallel.failure import Cause, Failure, failure_message, first_cause
from mcore_rl.parallel.layout import Layout
from mcore_rl.runtime.answers import Answer, Answering, Whereabouts, last_phase, message_of
from mcore_rl.runtime.shard import Shard, WorkerInput, WorkerOutput
from mcore_rl.runtime.shared_batch import PatchesRef, ShardRef, ShardRefs
from mcore_rl.runtime.watchdog import Watchdog, look_at, summary, write_hung

W = TypeVar("W", bound=Answering)
P = ParamSpec("P")
X = TypeVar("X")
R = TypeVar("R")
SHARED_BY = 8  # coordinates that read one object of Ray's store: a call of the store costs as much as 0.5 MB
POLL_S = 0.2  # between checks of pending calls: how soon a failure is noticed
SETTLE_S = 0.2  # after a worker failed by itself: wait for answers that are already on their way
DEVICE_FAILED = "AcceleratorError"  # torch's error for failures that a device or its driver reports
GRACE_S = 3.0  # after a worker failed because its peers were gone: wait for the failure that caused it


class WorkerGroup(Generic[W]):
    """The workers of one role.

    role: its name.  workers: Ray actors of class ``W``, in the order of the ranks of ``layout``.  hosts, logs: machine
    and log file of each.  watchdog: says when a call counts as hung.
    """

    def __init__(
        self,
        role: str,
        workers: Sequence[Any],
        layout: Layout,
        hosts: Sequence[str],
        logs: Sequence[Path],
        watchdog: Watchdog,
    ) -> None:
        assert len(workers) == layout.world_size == len(hosts) == len(logs)
        self.role = role
        self.layout = layout
        self._workers = list(workers)
        self.hosts = list(hosts)
        self._logs = list(logs)
        self._watchdog = watchdog
        self._whereabouts = list[Whereabouts]()
        self._under_way: list[object] = []  # pending calls, in the order in which workers answer them
        self._coordinates = [layout.coords(rank).dp for rank in range(layout.world_size)]
        # For each data-parallel coordinate, the rank that answers for all of its peers.
        self.leaders = [layout.rank_of(tp=0, cp=0, dp=dp, pp=0) for dp in range(layout.dp)]

    @property
    def neighbours(self) -> list[list[int]]:
        """The data-parallel coordinates, in groups of at most ``SHARED_BY`` whose leaders are on the same machine."""
        groups: list[list[int]] = []
        for _, together in groupby(range(self.layout.dp), key=lambda dp: self.hosts[self.leaders[dp]]):
            ranks = list(together)
            groups += [ranks[start : start + SHARED_BY] for start in range(0, len(ranks), SHARED_BY)]
        return groups

    async def all(self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Every worker's result of ``method``, in the order of the ranks."""
        name = method.__name__
        message = message_of(method, args, kwargs)
        return await self._collect(name, [worker.call.remote(message) for worker in self._workers])

    def put(self, shards: Sequence[Shard]) -> list[ShardRef]:
        """Puts ``shards`` into Ray's store; returns references."""
        return [ray.put(shard) for shard in shards]

    def put_patches(self, patches: NDArray[np.uint8]) -> PatchesRef:
        """Puts the patches of a picture into Ray's store; any thread may."""
        return ray.put(patches)

    async def map(
        self,
        method: Callable[Concatenate[W, WorkerInput[X], P], WorkerOutput[R]],
        inputs: Sequence[ShardRefs[X]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> tuple[list[R], list[ShardRef]]:
        """Calls ``method`` on every worker with the input of its data-parallel coordinate and the other arguments.

        inputs: one for each coordinate.
        Returns, for each coordinate, (the value that its leader returned; a reference to the leader's output shard).
        """
        assert len(inputs) == self.layout.dp, f"{len(inputs)} inputs for dp={self.layout.dp}"
        name = method.__name__
        message = message_of(method, args, kwargs)
        calls = []
        for rank, (worker, coordinate) in enumerate(zip(self._workers, self._coordinates, strict=True)):
            refs = inputs[coordinate]
            patches = refs.patches if self.layout.coords(rank).pp == 0 else []  # others have no vision tower
            calls.append(worker.call_on.remote(message, refs.portion, *refs.shards, *patches))
        results = await self._collect(name, [answer for answer, _ in calls])
        return [results[rank] for rank in self.leaders], [calls[rank][1] for rank in self.leaders]

    async def one(self, rank: int, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """The result of ``method`` on one worker alone; the method must not be collective."""
        call = self._workers[rank].call.remote(message_of(method, args, kwargs))
        results: list[R] = await self._collect(method.__name__, [call], [rank])
        return results[0]

    async def locate(self) -> None:
        """Record host, process id and node of each worker, to diagnose hangs."""
        self.hosts = await self.all(Answering.host)
        self._whereabouts = await self.all(Answering.whereabouts)

    def close(self) -> None:
        """Kills the processes."""
        for worker in self._workers:
            ray.kill(worker)

    def title(self, rank: int) -> str:
        """The name of a worker in messages."""
        return f"{self.role} rank {rank} ({self.layout.coords(rank)})"

    async def _collect(self, method: str, calls: Sequence[Any], ranks: Sequence[int] | None = None) -> list[Any]:
        """The values of ``calls``, or raises the first cause; ``ranks`` made them, None is all ranks.

        One thread waits for all calls together, since a coroutine per call would cost more than the call itself.
        """
        ranks = range(len(calls)) if ranks is None else ranks
        rank_of = dict(zip(calls, ranks, strict=True))
        waiting = list(calls)
        until = float("inf")
        begin = time.monotonic()
        limit_s = self._watchdog.limit_s(method)
        turn = object()
        self._under_way.append(turn)
        answers: dict[int, Answer] = {}
        try:
            while waiting and time.monotonic() < until:
                done, waiting = await asyncio.to_thread(ray.wait, waiting, num_returns=len(waiting), timeout=POLL_S)
                new = {rank_of[call]: answer for call, answer in zip(done, self._answers(done, rank_of), strict=True)}
                answers |= new
                if failures := [answer.failure for answer in new.values() if answer.failure is not None]:
                    settle = SETTLE_S if first_cause(failures).cause is Cause.own else GRACE_S
                    until = min(until, time.monotonic() + settle)
                if self._under_way[0] is not turn:  # workers answer one call after the other
                    begin = time.monotonic()
                elif waiting and until == float("inf") and time.monotonic() - begin > limit_s:
                    raise await asyncio.to_thread(self._hung, method, limit_s)
        finally:
            self._under_way.remove(turn)
        if any(answer.failure is not None for answer in answers.values()):
            self._raise(method, ranks, answers)
        self._watchdog.took(method, time.monotonic() - begin)
        return [answers[rank].value for rank in ranks]

    def _hung(self, method: str, limit_s: float) -> DeadWorkerError:
        """The error of a hung call, with what all ranks are doing: those that have answered may cause the hang."""
        what = f"{self.role}: no answer to {method} after {limit_s:.0f} s (trainer.watchdog says how long is too long)"
        titles = [self.title(rank) for rank in range(self.layout.world_size)]
        hung = look_at(titles, self.hosts, self._logs, self._whereabouts)
        path = write_hung(self._logs[0].parent, what, hung)
        return DeadWorkerError("\n".join([what, *summary(hung), f"The stacks of all ranks are in {path}"]))

    def _answers(self, done: Sequence[Any], rank_of: Mapping[Any, int]) -> list[Answer]:
        try:
            answers: list[Answer] = ray.get(list(done))
        except RayError:  # one of the calls failed
            return [self._answer(rank_of[call], call) for call in done]
        return answers

    def _answer(self, rank: int, call: Any) -> Answer:
        try:
            answer: Answer = ray.get(call)
        except RayError as error:
            what = "killed by the kernel or by Ray for want of memory" if isinstance(error, OutOfMemoryError) else ""
            what = what or f"its process died ({_reason(error)})"
            where = last_phase(self._logs[rank])
            failure = Failure(rank=rank, cause=Cause.own, phase=where, what=what, time_s=time.monotonic())
            return Answer(failure=failure)
        return answer

    def _raise(self, method: str, ranks: Sequence[int], answers: dict[int, Answer]) -> NoReturn:
        failures = {rank: answer.failure for rank, answer in answers.items() if answer.failure is not None}
        first = first_cause(list(failures.values()))
        if first.error is not None:
            error = pickle.loads(first.error)
            error.add_note(f"Raised by {self.title(first.rank)} on {self.hosts[first.rank]} in {first.phase}")
            raise error
        others = {}
        for rank in set(ranks) - {first.rank}:
            failure = failures.get(rank)
            done = "had finished" if rank in answers else f"stopped in {last_phase(self._logs[rank]) or method}"
            others[rank] = done if failure is None else failure.aftermath()
        titles = [self.title(rank) for rank in range(self.layout.world_size)]
        message = failure_message(first, self.hosts[first.rank], titles, others)
        is_mistake = first.cause is Cause.own and first.traceback and not first.what.startswith(DEVICE_FAILED)
        kind = WorkerError if is_mistake else DeadWorkerError
        raise kind(f"{message}\nIts output is in {self._logs[first.rank]}")


def _reason(error: RayError) -> str:
    """Ray's reason for a worker's death, in one line; Ray's own messages are a page long."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if line.lower().startswith(("worker exit", "the actor is dead because"))]
    return " ".join(telling) or lines[0] if lines else type(error).__name__
