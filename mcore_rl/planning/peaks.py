"""What a plan is made of: bytes by phase, place and part, seconds by part, and what speaks against the run."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from mcore_rl.errors import Violation


class Phase(Enum):
    """A part of a step; what is alive differs."""

    rollout = "rollout"
    sync = "sync"
    logprobs = "log-probs"
    update = "update"
    save = "save"


class Place(Enum):
    """What bytes are taken of: one device (on CPU: all processes of the machine together), one node, the disk."""

    device = "device"
    host = "host"
    disk = "disk"


@dataclass(frozen=True, kw_only=True)
class Row:
    """Bytes of one part in one phase.  exact: counted, not estimated."""

    phase: Phase
    place: Place
    part: str
    num_bytes: int
    exact: bool = False


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The rows of one phase and place, of the rank or node that needs most.

    where: which that is.  capacity: bytes that there are; None where nobody knows.
    """

    phase: Phase
    place: Place
    where: str
    rows: tuple[Row, ...]
    capacity: int | None

    @property
    def num_bytes(self) -> int:
        """Of all rows."""
        return sum(row.num_bytes for row in self.rows)

    @property
    def fits(self) -> bool:
        """Whether there is as much."""
        return self.capacity is None or self.num_bytes <= self.capacity


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run needs, and whether it is there.

    title, layout: for people.  num_gpus: devices of the whole run, processes on CPU.  num_parameters: of the policy.
    seconds: of a step, by part.  concurrency: sequences of the greatest length that a rollout engine's cache holds.
    tokens: of a step, and of its parts.  notes: what a person should know and is no mistake.
    """

    title: str
    layout: str
    num_nodes: int
    num_gpus: int
    num_parameters: int
    peaks: tuple[Peak, ...]
    seconds: dict[str, float]
    violations: list[Violation]
    concurrency: float | None = None
    tokens: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether nothing speaks against it."""
        return not self.violations

    @property
    def step_s(self) -> float:
        """Expected seconds of a step."""
        return sum(self.seconds.values())

    @property
    def rows(self) -> tuple[Row, ...]:
        """Of all peaks."""
        return tuple(row for peak in self.peaks for row in peak.rows)

    def peak(self, phase: Phase, place: Place = Place.device) -> Peak | None:
        """Of one phase and place; None where it needs nothing."""
        return next((each for each in self.peaks if (each.phase, each.place) == (phase, place)), None)
