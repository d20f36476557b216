"""The progress of long work: a bar with rate and time left on terminals, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

EVERY_S = 10.0  # between lines if it is no terminal


class WorkProgress:
    """``with WorkProgress("generating", total, "tokens") as work: work.advance(units=17)``, on standard error.

    unit: what the rate counts.  total: pieces of work.  now: seconds from any start.
    """

    def __init__(
        self,
        text: str,
        total: int,
        unit: str,
        console: Console | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._text = text
        self._total = total
        self._unit = unit
        self._now = now
        self._console = Console(stderr=True) if console is None else console
        self._begun = self._said = now()
        self._done = self._units = 0
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
        )
        hidden = not self._console.is_terminal
        self._bar = Progress(*columns, console=self._console, transient=True, disable=hidden)
        self._task = self._bar.add_task(text, total=total, rate="")

    @property
    def rate(self) -> float:
        """Units per second since the beginning."""
        return self._units / max(self._now() - self._begun, 1e-9)

    def advance(self, units: int) -> None:
        """Note one finished piece of work of ``units`` units."""
        self._done += 1
        self._units += units
        self._bar.update(self._task, completed=self._done, rate=f"{self.rate:,.0f} {self._unit}/s")
        now = self._now()
        if not self._console.is_terminal and now - self._said >= EVERY_S:
            self._said = now
            left_s = (now - self._begun) / self._done * (self._total - self._done)
            line = f"{self._text}: {self._done}/{self._total}, {self.rate:,.0f} {self._unit}/s, {left_s:.0f} s left"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()
