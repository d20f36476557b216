"""Measures how long engines were idle because every episode waited for a tool or an interaction."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class EngineWaits:
    """Counts what draws and what waits; all in one event loop."""

    def __init__(self) -> None:
        self._num_drawing = self._num_waiting = 0
        self._idle_since: float | None = None
        self._seconds = 0.0

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """While open: an engine has something to draw."""
        self._change(drawing=1)
        try:
            yield
        finally:
            self._change(drawing=-1)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """While open: an episode waits for a tool or an interaction."""
        self._change(waiting=1)
        try:
            yield
        finally:
            self._change(waiting=-1)

    def take(self) -> float:
        """Seconds since the last call in which nothing was drawn and an episode waited."""
        self._change()
        seconds = self._seconds
        self._seconds = 0.0
        return seconds

    def _change(self, drawing: int = 0, waiting: int = 0) -> None:
        now = time.monotonic()
        if self._idle_since is not None:
            self._seconds += now - self._idle_since
        self._num_drawing += drawing
        self._num_waiting += waiting
        self._idle_since = now if self._num_waiting and not self._num_drawing else None
