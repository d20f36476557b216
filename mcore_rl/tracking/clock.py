"""Measures where the seconds of a step go, and keeps when its phases were open: ``timeline.jsonl``, an object a step.

A phase inside another is a part of it: ``time/validate/generate`` counts in ``time/validate`` and never in
``time/generate``, so top-level phases add up to at most the step, and the rest is the controller's own overhead.
Phases may also overlap without nesting, as in asyncio tasks; overlapping time counts once.  For one thread; no device
is synchronised.

metrics.jsonl has how long a phase took in all; timeline.jsonl has when, so that a reader sees what waits for what.

The invariant: ``time/step * (1 - perf/overhead_share)`` is the time in which at least one phase was open.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.tracking.jsonl import StepFile, read_steps
from mcore_rl.tracking.metrics import metric_of

TIMELINE = "timeline.jsonl"
MAX_SPANS = 500  # of a step in the file; no step of ours has a tenth of it


@dataclass(frozen=True)
class PhaseSpan:
    """A phase was open from start to end, seconds since the step began.  phase: ``validate/generate`` is a part.

    A name that no phase has is of a task beside the phases: ``next step`` or ``drawing``, of rollouts drawn ahead.
    """

    phase: str
    start: float
    end: float


@dataclass
class _Span:
    """Seconds in which a phase was open at least once.  open: how often it is open now.  since: when it opened."""

    seconds: float = 0.0
    open: int = 0
    since: float = 0.0

    def enter(self, now: float) -> None:
        if self.open == 0:
            self.since = now
        self.open += 1

    def leave(self, now: float) -> bool:
        """Whether it is now closed."""
        self.open -= 1
        if self.open == 0:
            self.seconds += now - self.since
        return self.open == 0


class Clock:
    """``with clock("generate"): ...``, then ``clock.step()`` once at the end of each step.

    now: seconds from any start, never backwards.  spans: when each phase of the last finished step was open.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self.spans: tuple[PhaseSpan, ...] = ()
        self._open: list[str] = []
        self._begin(now())

    def _begin(self, start: float) -> None:
        self._start = start
        self._any = _Span()
        self._phases: dict[str, _Span] = {}
        self._spans: list[PhaseSpan] = []

    @property
    def begun(self) -> float:
        """When the step at hand began, by ``now``."""
        return self._start

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count the block as ``phase``, a name of ``metrics.PHASES``, or any name inside another phase."""
        path = self._path(phase)
        metric_of(f"time/{path}")
        span = self._phases.setdefault(path, _Span())
        self._open.append(path)
        now = self._now()
        span.enter(now)
        self._any.enter(now)
        try:
            yield
        finally:
            now = self._now()
            if span.leave(now):
                self._spans.append(PhaseSpan(path, span.since - self._start, now - self._start))
            self._any.leave(now)
            self._open.remove(path)

    @contextmanager
    def beside(self, name: str) -> Iterator[None]:
        """Show the block as ``name`` in ``spans`` and count it nowhere: it is a task that goes on beside the phases."""
        start = self._now()
        try:
            yield
        finally:
            self._spans.append(PhaseSpan(name, max(0.0, start - self._start), self._now() - self._start))

    def step(self) -> dict[str, float]:
        """``time/*`` in seconds and ``perf/overhead_share`` since the last call; restarts.  No phase may be open."""
        assert not self._open, f"the step ends while {self._open} are open"
        now = self._now()
        whole = now - self._start
        seconds = {f"time/{path}": span.seconds for path, span in self._phases.items()}
        seconds["time/step"] = whole
        seconds["perf/overhead_share"] = max(0.0, 1 - self._any.seconds / whole) if whole > 0 else 0.0
        self.spans = tuple(sorted(self._spans, key=lambda span: span.start))
        self._begin(now)
        return seconds

    def _path(self, phase: str) -> str:
        if not self._open:
            return phase
        around = self._open[-1]
        return around if around.rpartition("/")[2] == phase else f"{around}/{phase}"  # again, by another task


class TimelineFile(StepFile):
    """Appends to a timeline.jsonl."""

    def write(self, step: int, spans: Sequence[PhaseSpan]) -> None:
        """Write and flush the line of one step.  OSError: it did not fit on the disk."""
        written = [[span.phase, round(span.start, 4), round(span.end, 4)] for span in spans[:MAX_SPANS]]
        self.append({"step": step, "spans": written})


def read_timeline(path: Path) -> dict[int, tuple[PhaseSpan, ...]]:
    """The spans of each step of a timeline.jsonl; {} if there is no file.  Lines that are none are left out."""
    timeline = {}
    for row in read_steps(path):
        spans = row.get("spans")
        if isinstance(spans, list):
            timeline[row["step"]] = tuple(PhaseSpan(*span) for span in spans if _is_span(span))
    return timeline


def _is_span(span: object) -> bool:
    match span:
        case [str(), int() | float() as start, int() | float() as end]:
            return 0 <= start <= end
    return False
