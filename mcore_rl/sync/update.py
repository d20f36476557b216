"""Weight updates: the order of calls to trainers and engines.

The engines pause and refuse new samples; their workers receive while the training ranks publish; when all are done, the
engines take the version and go on.  After any failure every engine knows that its weights are incomplete, and refuses
to generate until an update is complete.  The first update of a channel is checked before any engine generates with it;
an engine that was restarted joins a new channel.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any, Protocol, TypeVar

from mcore_rl.config.rollout import RolloutLayout
from mcore_rl.errors import DeadEngineError, DeadWorkerError, SyncError
from mcore_rl.rollout.protocol import Pause, RolloutEngine
from mcore_rl.rollout.weight_channel import answer_of
from mcore_rl.sync.check import Expected, HeldFingerprints, differences
from mcore_rl.sync.publish import Published

T = TypeVar("T")
MAX_SHOWN = 20


class Trainers(Protocol):
    """The training ranks.  ``opening`` calls the ``Publisher`` of one of them, the other methods those of all."""

    async def opening(self, first_rank: int, attempt: int) -> bytes:
        """``Publisher.opening`` of one training rank."""
        ...

    async def open(self, attempt: int) -> None:
        """``Publisher.open`` on all training ranks."""
        ...

    async def publish(self, version: int) -> list[Published]:
        """``Publisher.publish`` on all training ranks; results in the order of the ranks."""
        ...

    async def expected(self, version: int) -> Expected:
        """``check.expected_weights`` on all training ranks; the result is the same on each."""
        ...


class WeightUpdater:
    """Brings the trainers' weights into ``engines``, which are together, in this order, the ranks of ``layout``."""

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
        """Open one channel for all.  Raises SyncError or WeightMapError of the member that failed."""
        self._attempt += 1
        openings = {rank: await self.trainers.opening(rank, self._attempt) for rank in self.engines}
        joining = [_call(engine, "sync_open", openings[rank]) for rank, engine in self.engines.items()]
        await _all(*joining, self.trainers.open(self._attempt))
        self._is_open, self._is_checked = True, False

    def rejoin(self) -> None:
        """Note that an engine was restarted and is not in the channel: the next update opens a new one."""
        self._is_open = False

    async def update(self, version: int, pause: Pause = Pause.keep) -> list[Published]:
        """Bring the trainers' weights into all engines as ``version``.  Returns each training rank's statistics.

        pause: what happens to samples under way (``Pause.keep``: they freeze, go on with the new weights, and report a
        version for each span of tokens).  Opens the channel if it is not open; the first update of a channel is
        checked.

        Raises SyncError with the first cause, DeadEngineError or DeadWorkerError if a process is gone; all engines then
        refuse to generate until an update is complete.
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
            await asyncio.gather(*telling, return_exceptions=True)  # an engine that is gone cannot answer
            raise
        published: list[Published] = results[-1]
        return published

    async def check(self) -> None:
        """Compare every tensor of every rollout rank with the trainers', who must not have trained since ``update``.

        Raises SyncError with each tensor that is wrong, missing or stale (equal to the version of an earlier check).
        """
        assert self._version is not None, "nothing was updated yet"
        expected = await self.trainers.expected(self._version)
        if self._expected is not None and self._expected.version != expected.version:
            self._previous = self._expected
        self._expected = expected
        held = HeldFingerprints(values={}, copies={})
        for rank, engine in self.engines.items():
            prints, copies = await _all(_call(engine, "sync_fingerprints"), _call(engine, "sync_copies"))
            held = held.beside(HeldFingerprints.of(rank, prints, copies))
        problems = differences(expected, held, self._previous)
        if problems:
            shown = [
                *problems[:MAX_SHOWN],
                *([f"and {len(problems) - MAX_SHOWN} more"] if len(problems) > MAX_SHOWN else []),
            ]
            head = f"{len(problems)} tensors of the rollout ranks are not the trainer's, version {self._version}:"
            raise SyncError("\n  - ".join([head, *shown]) + "\nPublish again; if they stay, report it with this list")
        self._is_checked = True


async def _call(engine: RolloutEngine, method: str, *args: object) -> list[Any]:
    """Call ``method`` of each worker's extension; results in rank order."""
    return [answer_of(answer) for answer in await engine.rpc(method, *args)]


async def _all(*calls: Awaitable[T]) -> list[T]:
    """The results of ``calls``, after all have ended, so that none still waits for another.

    Of several errors it raises the most informative: a death, else what the members agreed on.
    """
    results = await asyncio.gather(*calls, return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    for kind in (DeadEngineError, DeadWorkerError, SyncError, BaseException):
        for error in errors:
            if isinstance(error, kind):
                raise error
    return [result for result in results if not isinstance(result, BaseException)]
