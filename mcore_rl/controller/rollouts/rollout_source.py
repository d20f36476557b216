"""Hands each step its rollouts.  With ``trainer.mode=one_step_off`` the next step's are drawn while a step is trained.

The invariants: no draw goes on while engines receive weights, so that all tokens of a draw are of one version; and a
checkpoint keeps what was drawn and not handed over (``rollouts/kept_draws.py``), if all of it was drawn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from mcore_rl.controller.rollouts.kept_draws import KeptDraws
from mcore_rl.controller.step.preemption import Preempted, Preemption
from mcore_rl.controller.step.rollout_collection import CollectProgress, RolloutBatch, RolloutCollector
from mcore_rl.data.prompts import PromptRow
from mcore_rl.data.sampler import PromptSampler
from mcore_rl.ground.errors import DeadEngineError
from mcore_rl.tracking.clock import Clock

DRAWN_AHEAD = "next step"  # the name of such a draw in timeline.jsonl


@dataclass(frozen=True, kw_only=True)
class Ahead:
    """How rollouts are drawn that outlive a step, or are drawn while the trainer works.

    collector: its engines are not restarted: the weights that they would need may be changing.
    is_dead: whether an engine died, and was not restarted since.
    restart_dead: restarts dead engines, once the trainer has done its work; they receive weights later.
    recover: restarts dead engines while the trainer waits, and gives all engines the weights that they had.
    interrupt: see ``EnginePool.interrupt``.
    """

    collector: RolloutCollector
    is_dead: Callable[[], bool]
    restart_dead: Callable[[DeadEngineError], Awaitable[None]]
    recover: Callable[[DeadEngineError], Awaitable[None]]
    interrupt: Callable[[], Awaitable[None]]


class RolloutSource:
    """The rollouts of one step after the other; a context manager, which ends the draw that goes on.

    Args:
        collector: collects while the trainer waits, and survives the death of engines.
        sampler: ``next_rows(count)`` takes rows from it.
        num_steps: the last step, after which nothing is drawn.
        clock: shows in the timeline when rollouts were drawn ahead.
        progress: is told of a draw that the trainer waits for.
        ahead: None: nothing is drawn while the trainer works.
    """

    def __init__(
        self,
        collector: RolloutCollector,
        sampler: PromptSampler,
        next_rows: Callable[[int], list[PromptRow]],
        num_steps: int,
        clock: Clock,
        progress: CollectProgress,
        ahead: Ahead | None = None,
    ) -> None:
        self._collector = collector
        self._sampler = sampler
        self._next_rows = next_rows
        self._num_steps = num_steps
        self._clock = clock
        self._progress = progress
        self._ahead = ahead
        self._task: asyncio.Task[RolloutBatch] | None = None  # the last draw ahead
        self._ready: RolloutBatch | None = None  # in its place what a checkpoint had, or an abandoned step
        self._before: dict[str, Any] | None = None  # the sampler's state before it, until it is handed over
        self._kept_at_end: KeptDraws | None = None

    async def __aenter__(self) -> RolloutSource:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kept_at_end = self.kept
        await self._end()

    @property
    def place(self) -> dict[str, Any]:
        """The sampler's state after the rows of the last step that has its rollouts."""
        return self._sampler.state_dict() if self._before is None else self._before

    @property
    def kept(self) -> KeptDraws:
        """The rollouts that are drawn and that no step has; once the source has ended, as they were then."""
        if self._kept_at_end is not None:
            return self._kept_at_end
        ready = self._ready
        task = self._task
        if ready is None and task is not None and task.done() and not task.cancelled() and task.exception() is None:
            ready = task.result()
        if self._before is None or ready is None:
            return KeptDraws(place=self.place)
        return KeptDraws(place=self._sampler.state_dict(), batch=ready, before=self._before)

    def return_to(self, kept: KeptDraws) -> None:
        """Goes back to ``kept``: gives rows after it back to the sampler; a draw that goes on is cancelled."""
        self._give_back(kept.place)
        self._ready = kept.batch
        self._before = kept.before

    def resume(self, kept: KeptDraws, version: int) -> None:
        """Goes on with ``kept`` of a checkpoint, after step ``version``."""
        self.return_to(kept)

    def _give_back(self, place: dict[str, Any]) -> None:
        if self._task is not None:
            self._task.cancel()  # of one that failed: nobody is told of its error
        self._before = self._ready = None
        self._sampler.load_state_dict(place)

    async def next(self, step: int) -> RolloutBatch:
        """The rollouts of ``step``; those of the step after it are begun.  Raises as ``RolloutCollector.collect``."""
        if self._before is None:
            rollouts = await self._collector.collect(step, self._next_rows, self._progress)
        elif self._ready is not None:
            rollouts = self._ready
            self._before = self._ready = None
        else:
            assert self._task is not None
            rollouts = await self._task
            self._before = None
        if self._ahead is not None and step < self._num_steps:
            self._before = self._sampler.state_dict()
            self._task = asyncio.create_task(self._draw_ahead(self._ahead.collector, step + 1))
        return rollouts

    async def take_back(self) -> None:
        """Does nothing: what is drawn ahead is drawn to its end before a checkpoint is written."""

    async def settle(self, preemption: Preemption) -> None:
        """Waits until nothing is drawn, as it must be before engines receive weights.

        If the run is told to end, the draw is cancelled.  If an engine died, it is restarted, and ``next`` draws again,
        with the weights that it receives.  Any other error is raised by ``next``, since the step at hand is complete
        without the draw.  Raises as ``EngineRestarter.restart_dead``.
        """
        if self._before is None or self._ready is not None:
            return
        assert self._task is not None
        try:
            await preemption.cancel_if_asked(asyncio.wait([self._task]))
        except Preempted:
            await self._end()
            return
        death = self._task.exception()
        if self._ahead is not None and isinstance(death, DeadEngineError):
            await self._end()
            await self._ahead.restart_dead(death)

    async def _draw_ahead(self, collector: RolloutCollector, step: int) -> RolloutBatch:
        with self._clock.beside(DRAWN_AHEAD):
            return await collector.collect(step, self._next_rows, lambda done, of: None)

    async def _end(self) -> None:
        """Ends the draw that goes on, and gives the rows of one that was not handed over back."""
        if self._before is not None:
            self._give_back(self._before)
        if self._task is not None:
            await asyncio.wait([self._task])
