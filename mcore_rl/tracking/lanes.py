"""What each engine and the trainer did at every moment of a step: the lanes of a run, and ``lanes.jsonl``.

A lane shows one state at a time; where several hold, the first of ``State``.  Time in none of them is idle, and is not
written.  Seconds of a state are exact; spans are joined and left out where a step has more than ``MAX_SPANS`` of a
lane, so that no engine can fill a disk.  Whoever begins a state names itself, and ends it once or more often: an engine
that is restarted forgets what its dead process had begun.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from mcore_rl.tracking.clock import PhaseSpan
from mcore_rl.tracking.jsonl import StepFile, read_steps
from mcore_rl.tracking.metrics import is_phase

LANES = "lanes.jsonl"
TRAINER = "trainer"
MAX_SPANS = 32  # of a lane in a step
MAX_LANES = 33  # in the file: those of more engines count in the metrics alone
GAP_S = 0.001  # between two spans of a state that are written as one


class State(Enum):
    """What a lane shows; of several the first.

    restarting: the process is started anew.  updating: weights are sent or received.  paused: an engine stands for an
    update, before and after it receives.  drawing: it has requests.  training: the trainer scores or trains.
    saving: a checkpoint or an export.
    """

    restarting = "restarting"
    updating = "updating"
    paused = "paused"
    drawing = "drawing"
    training = "training"
    saving = "saving"


WORKS = frozenset(State) - {State.restarting}  # in the others a device is idle


@dataclass(frozen=True)
class LaneSpan:
    """A lane showed ``state`` from start to end, seconds."""

    state: State
    start: float
    end: float


class Lane:
    """The lane of an engine.  now: seconds from any start, the same as that of the run's ``Clock``."""

    def __init__(self, name: str, now: Callable[[], float] = time.perf_counter) -> None:
        self.name = name
        self._now = now
        self._holds: dict[State, set[object]] = {state: set() for state in State}
        self._shown: State | None = None
        self._since = now()
        self._spans: list[LaneSpan] = []
        self._gap_s = GAP_S
        self._seconds: dict[State, float] = {}
        self._taken: Mapping[State, float] = {}

    @property
    def state(self) -> State | None:
        """What it shows now; None: idle."""
        return self._shown

    def begin(self, state: State, who: object) -> None:
        """``state`` holds until ``who`` ends it."""
        self._holds[state].add(who)
        self._show()

    def end(self, state: State, who: object) -> None:
        """``who`` has ended ``state``, or had not begun it."""
        self._holds[state].discard(who)
        self._show()

    @contextmanager
    def within(self, state: State) -> Iterator[None]:
        """Within: ``state`` holds."""
        who = object()
        self.begin(state, who)
        try:
            yield
        finally:
            self.end(state, who)

    def clear(self) -> None:
        """Nothing holds any more: the process that it held for is gone."""
        for who in self._holds.values():
            who.clear()
        self._show()

    def take(self, begin: float, end: float) -> tuple[LaneSpan, ...]:
        """The spans of a step, in seconds since it began; a state that holds goes on in the next.

        begin, end: of the step, by ``now``.  Seconds of ``seconds`` are then those of this step.
        """
        self._close(end)
        spans = [
            LaneSpan(each.state, max(0.0, each.start - begin), each.end - begin)
            for each in self._spans
            if each.end > begin
        ]
        self._spans = []
        self._gap_s = GAP_S
        self._taken = self._seconds
        self._seconds = {}
        return tuple(spans)

    @property
    def seconds(self) -> Mapping[State, float]:
        """Of each state, in the step that was taken last."""
        return self._taken

    def _show(self) -> None:
        shown = next((state for state, who in self._holds.items() if who), None)
        if shown is not self._shown:
            self._close(self._now())
            self._shown = shown

    def _close(self, now: float) -> None:
        """Adds the span that ends now."""
        state = self._shown
        since = self._since
        self._since = now
        if state is None or now <= since:
            return
        self._seconds[state] = self._seconds.get(state, 0.0) + now - since
        self._spans.append(LaneSpan(state, since, now))
        if len(self._spans) > 2 * MAX_SPANS:
            self._spans, self._gap_s = fewer(self._spans, MAX_SPANS, self._gap_s)


def fewer(spans: Sequence[LaneSpan], most: int, gap_s: float = GAP_S) -> tuple[list[LaneSpan], float]:
    """At most ``most`` spans, and the gap at which they are so few.

    Spans of a state that are no further apart than the gap are joined, then those that are shorter than it left out;
    the gap is ``gap_s``, doubled as often as it takes.
    """
    kept = _joined(spans, gap_s)
    while len(kept) > most:
        kept = [each for each in kept if each.end - each.start >= gap_s]
        if len(kept) > most:
            gap_s *= 2
        kept = _joined(kept, gap_s)
    return kept, gap_s


def _joined(spans: Sequence[LaneSpan], gap_s: float) -> list[LaneSpan]:
    joined: list[LaneSpan] = []
    for span in spans:
        if joined and joined[-1].state is span.state and span.start - joined[-1].end <= gap_s:
            joined[-1] = LaneSpan(span.state, joined[-1].start, span.end)
        else:
            joined.append(span)
    return joined


# What the trainer does in phases of a step in which it trains nothing; None: it waits for rollouts.
_STATES = {"generate": None, "score": None, "validate": None, "sync": State.updating, "save": State.saving}


def trainer_state(phase: str) -> State | None:
    """What the trainer does in a phase of a step; None where it waits, and in what is no phase."""
    return _STATES.get(phase, State.training) if is_phase(phase) else None


def trainer_lane(phases: Sequence[PhaseSpan]) -> tuple[LaneSpan, ...]:
    """The trainer's spans in a step, from when its phases were open."""
    return tuple(
        LaneSpan(state, each.start, each.end) for each in phases if (state := trainer_state(each.phase)) is not None
    )


def idle_share(seconds: Mapping[State, float], whole_s: float) -> float:
    """The share of ``whole_s`` in which a lane did no work; one that restarts does none."""
    worked = sum(spent for state, spent in seconds.items() if state in WORKS)
    return min(1.0, max(0.0, 1 - worked / whole_s)) if whole_s > 0 else 0.0


@dataclass(frozen=True)
class StepLanes:
    """The lanes of a step.

    at: its begin, seconds since 1970.  seconds: its length.  lanes: by name, the trainer's first.
    """

    at: float
    seconds: float
    lanes: Mapping[str, Sequence[LaneSpan]]


class LanesFile(StepFile):
    """Appends to a lanes.jsonl."""

    def write(self, step: int, lanes: StepLanes) -> None:
        """Write and flush the line of one step.  OSError: it did not fit on the disk."""
        written = {
            name: [[each.state.value, round(each.start, 4), round(each.end, 4)] for each in fewer(spans, MAX_SPANS)[0]]
            for name, spans in list(lanes.lanes.items())[:MAX_LANES]
        }
        self.append({"step": step, "at": round(lanes.at, 4), "seconds": round(lanes.seconds, 4), "lanes": written})


def read_lanes(path: Path) -> dict[int, StepLanes]:
    """The lanes of each step of a lanes.jsonl; {} if there is no file.  What is none is left out."""
    steps = {}
    for row in read_steps(path):
        match row:
            case {
                "step": int() as step,
                "at": int() | float() as at,
                "seconds": int() | float() as seconds,
                "lanes": dict() as lanes,
            }:
                spans = {str(name): tuple(_spans(each)) for name, each in lanes.items()}
                steps[step] = StepLanes(float(at), float(seconds), spans)
    return steps


def _spans(written: object) -> Iterator[LaneSpan]:
    states = {state.value: state for state in State}
    for each in written if isinstance(written, list) else ():
        match each:
            case [str() as state, int() | float() as start, int() | float() as end]:
                if state in states and 0 <= start <= end:
                    yield LaneSpan(states[state], start, end)
