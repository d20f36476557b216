"""Weight updates, seen from whoever drives trainers and engines: in which order who is asked for what.

Engines pause and refuse new samples, their workers receive while the training ranks publish, and only when every one of
them is done do the engines take the version and go on.  Whatever fails, every engine is told that its weights are not
whole, and keeps refusing until an update is complete.  The first update of a channel, which an engine that was started
again joins anew, is checked before anybody generates with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any, Protocol, TypeVar

from mcore_rl.config.rollout import RolloutLayout
from mcore_rl.errors import DeadEngineError, DeadWorkerError, SyncError
from mcore_rl.rollout.protocol import Pause, RolloutEngine
from mcore_rl.rollout.weight_channel import answer_of
from mcore_rl.sync.check import Expected, Held, differences
from mcore_rl.sync.publish import Published

T = TypeVar("T")
MAX_SHOWN = 20


class Trainers(Protocol):
    """The training ranks; each method calls the ``Publisher`` of every one of them, ``opening`` of one."""

    async def opening(self, first_rank: int, attempt: int) -> bytes:
        """``Publisher.opening``."""
        ...

    async def open(self, attempt: int) -> None:
        """``Publisher.open``."""
        ...

    async def publish(self, version: int) -> list[Published]:
        """``Publisher.publish``, in the order of the ranks."""
        ...

    async def expected(self, version: int) -> Expected:
        """``check.expected_weights``, of any one: they agree."""
        ...


class WeightUpdater:
    """Keeps ``engines``, which together are the ranks of ``layout`` in this order, at the trainers' weights."""

    def __init__(self, engines: Sequence[RolloutEngine], layout: RolloutLayout, trainers: Trainers) -> None:
        each = layout.tp * layout.engine_dp
        assert len(engines) * each == layout.world_size, f"{len(engines)} engines of {each} ranks are not {layout}"
        self.engines = dict(zip(range(0, layout.world_size, each), engines, strict=True))
        self.trainers = trainers
        self._is_open = self._is_checked = False
        self._attempt = 0
        self._version: int | None = None
        self._previous: Expected | None = None
        self._expected: Expected | None = None

    async def open(self) -> None:
        """Join all in one channel.  Raises SyncError or WeightMapError with what one of them found."""
        self._attempt += 1
        openings = {rank: await self.trainers.opening(rank, self._attempt) for rank in self.engines}
        joining = [_call(engine, "sync_open", openings[rank]) for rank, engine in self.engines.items()]
        await _all(*joining, self.trainers.open(self._attempt))
        self._is_open, self._is_checked = True, False

    def rejoin(self) -> None:
        """An engine was started again, and is no member of the channel: all join anew at the next update."""
        self._is_open = False

    async def update(self, version: int, pause: Pause = Pause.keep) -> list[Published]:
        """Bring the trainers' weights into all engines as ``version``; what each training rank did.

        pause: what becomes of samples under way (``Pause.keep``: they are frozen, go on with the new weights and report
        a version for each span of tokens).  Opens the channel where it is not open; the first update of a channel is
        checked.

        Raises SyncError with the first cause, DeadEngineError or DeadWorkerError where somebody is gone; all engines
        then refuse to generate until an update is complete.
        """
        engines = list(self.engines.values())
        try:
            await _all(*(engine.start_update(pause) for engine in engines))
            if not self._is_open:
                await self.open()
            receiving = [_call(engine, "sync_receive", version) for engine in engines]
            results = await _all(*receiving, self.trainers.publish(version))
            self._version = version
            if not self._is_checked:
                await self.check()
            await _all(*(engine.finish_update(version) for engine in engines))
        except Exception as error:
            self._is_open = False
            telling = (engine.fail_update(str(error)) for engine in engines)
            await asyncio.gather(*telling, return_exceptions=True)  # one that is gone cannot be told
            raise
        published: list[Published] = results[-1]
        return published

    async def check(self) -> None:
        """Hold every tensor of every rollout rank against the trainers'.  They must not have trained since ``update``.

        Raises SyncError naming each that is wrong, missing or stale; stale is known of what an earlier check saw.
        """
        assert self._version is not None, "nothing was updated yet"
        expected = await self.trainers.expected(self._version)
        if self._expected is not None and self._expected.version != expected.version:
            self._previous = self._expected
        self._expected = expected
        held = Held(values={}, copies={})
        for rank, engine in self.engines.items():
            prints, copies = await _all(_call(engine, "sync_fingerprints"), _call(engine, "sync_copies"))
            held = held.beside(Held.of(rank, prints, copies))
        found = differences(expected, held, self._previous)
        if found:
            shown = [*found[:MAX_SHOWN], *([f"and {len(found) - MAX_SHOWN} more"] if len(found) > MAX_SHOWN else [])]
            head = f"{len(found)} tensors of the rollout ranks are not the trainer's, version {self._version}:"
            raise SyncError("\n  - ".join([head, *shown]) + "\nPublish again; if they stay, report it with this list")
        self._is_checked = True


async def _call(engine: RolloutEngine, method: str, *args: object) -> list[Any]:
    """What each worker's extension answers, in rank order."""
    return [answer_of(answer) for answer in await engine.rpc(method, *args)]


async def _all(*calls: Awaitable[T]) -> list[T]:
    """The results, once all ended: none may be left at a meeting that another never comes to.

    Of several errors the one that knows most is raised: that somebody died, else what the members agreed on.
    """
    results = await asyncio.gather(*calls, return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    for kind in (DeadEngineError, DeadWorkerError, SyncError, BaseException):
        for error in errors:
            if isinstance(error, kind):
                raise error
    return [result for result in results if not isinstance(result, BaseException)]
