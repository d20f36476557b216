"""A run that is told to leave: it saves what is complete, and ends so that a launcher starts it again.

Slurm sends SIGTERM before it takes a job's nodes away, and what ``--signal`` names before a time limit.  Neither leaves
time for a step; so one that has changed nothing yet is given up, and one that is changing weights is finished.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from mcore_rl.controller.lifecycle.run_checkpoints import Progress

REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: nothing is wrong, try again
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Preempted(Exception):
    """The step is given up; it has changed nothing."""


class Resumable(Protocol):
    """What trains, and can be gone on with."""

    @property
    def progress(self) -> Progress:
        """Of the steps that are complete."""
        ...

    async def conclude_saving(self) -> None:
        """The step that is complete has a checkpoint."""
        ...


T = TypeVar("T")
R = TypeVar("R", bound=Resumable)


class Preemption:
    """asked_by: name of the signal that came; None while the run may stay."""

    def __init__(self) -> None:
        self.asked_by: str | None = None
        self._asked = asyncio.Event()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within: ``SIGNALS`` ask; a second one ends the run at once, as Ctrl-C does.  In the main thread alone."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def asked(number: signal.Signals) -> None:
            if self.asked_by is not None:
                task.cancel()
            self.asked_by = number.name
            self._asked.set()

        for number in SIGNALS:
            loop.add_signal_handler(number, asked, number)
        try:
            yield
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)

    def raise_if_asked(self) -> None:
        """Preempted: it was asked."""
        if self._asked.is_set():
            raise Preempted

    async def cancel_if_asked(self, work: Awaitable[T]) -> T:
        """The result of ``work``, which may be given up at any moment.  Preempted: it was, or was not begun."""
        task, asked = asyncio.ensure_future(work), asyncio.ensure_future(self._asked.wait())
        try:
            await asyncio.wait([task, asked], return_when=asyncio.FIRST_COMPLETED)
            if not self._asked.is_set():
                return await task
        finally:
            asked.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
        task.cancelled() or task.exception()
        raise Preempted

    async def open_and_train(self, opening: Awaitable[R], train: Callable[[R], Awaitable[None]]) -> R:
        """What ``opening`` gives, once ``train`` is done with it.  Preempted: it was told to leave, and has saved."""
        with self.listening():
            try:
                run = await self.cancel_if_asked(opening)
            except Preempted:
                raise Preempted(f"left before it began, on {self.asked_by}") from None
            try:
                await train(run)
            except Preempted:
                await run.conclude_saving()
                raise Preempted(f"left after step {run.progress.step}, on {self.asked_by}") from None
        return run
