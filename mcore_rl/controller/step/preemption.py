"""Preemption: a run that is told to end saves the last complete step, and ends so that a launcher restarts it.

Slurm sends SIGTERM before it takes a job's nodes away, and the signal of ``--signal`` before the time limit.  Neither
leaves time for a whole step.  So a step that has changed nothing yet is abandoned, and one that is changing weights is
finished.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

REQUEUE = 75  # exit code EX_TEMPFAIL of sysexits.h: a temporary failure, try again
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Preempted(Exception):
    """The run was told to end; the current step is abandoned and has changed nothing."""


class Counted(Protocol):
    """A place in a run.  step: the last complete step."""

    step: int


class Resumable(Protocol):
    """A run that trains and can be resumed."""

    @property
    def progress(self) -> Counted:
        """The progress after the last complete step."""
        ...

    async def conclude_saving(self) -> None:
        """Makes sure that the last complete step has a checkpoint."""
        ...


T = TypeVar("T")
R = TypeVar("R", bound=Resumable)


class Preemption:
    """Listens for the signals that tell a run to end.  asked_by: the signal, or who else asked; None: nobody yet."""

    def __init__(self) -> None:
        self.asked_by: str | None = None
        self._asked = asyncio.Event()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While active: one of ``SIGNALS`` tells the run to end, a second one ends it at once, as Ctrl-C does.

        Signals reach the main thread alone: in another one nothing is listened for.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
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

    def ask(self, by: str) -> None:
        """Tells the run to end, as a signal does.  by: whose wish it is, for the message."""
        self.asked_by = self.asked_by or by
        self._asked.set()

    def raise_if_asked(self) -> None:
        """Raises Preempted if the run was told to end."""
        if self._asked.is_set():
            raise Preempted

    async def cancel_if_asked(self, work: Awaitable[T]) -> T:
        """The result of ``work``, which may be cancelled at any moment.

        Raises Preempted if the run is told to end before ``work`` is done, or was told so before it began.
        """
        task = asyncio.ensure_future(work)
        asked = asyncio.ensure_future(self._asked.wait())
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
        """Opens a run, trains it, and returns it.

        Raises Preempted, with a message, if the run was told to end; it has then saved what was complete.
        """
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
