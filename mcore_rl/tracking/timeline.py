"""timeline.jsonl: when the phases of each step were open, one JSON object a step; the report draws it.

metrics.jsonl has how long a phase took in all; here is when, so that a reader sees what waits for what.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.tracking.jsonl import StepFile, read_steps

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
