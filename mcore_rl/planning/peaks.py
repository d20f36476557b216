"""The records of a plan: bytes by phase, place and part, seconds by part, and the violations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from mcore_rl.ground.errors import Violation
from mcore_rl.planning.step_range import Calibration


class Phase(Enum):
    """A phase of a step; each has other things in memory."""

    rollout = "rollout"
    sync = "sync"
    logprobs = "log-probs"
    update = "update"
    save = "save"


class Place(Enum):
    """Where bytes are: on one device (on CPU: in all processes of the machine), on one node's host, on the disk."""

    device = "device"
    host = "host"
    disk = "disk"


@dataclass(frozen=True, kw_only=True)
class Row:
    """The bytes of one part in one phase and place.  exact: whether they are counted rather than estimated."""

    phase: Phase
    place: Place
    part: str
    num_bytes: int
    exact: bool = False


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The rows of one phase and place, for the rank or node that needs most.

    where: that rank or node, in words.  capacity: the available bytes; None if that is unknown.
    """

    phase: Phase
    place: Place
    where: str
    rows: tuple[Row, ...]
    capacity: int | None

    @property
    def num_bytes(self) -> int:
        """The sum of all rows."""
        return sum(row.num_bytes for row in self.rows)

    @property
    def fits(self) -> bool:
        """True if the peak is within capacity, or if the capacity is unknown."""
        return self.capacity is None or self.num_bytes <= self.capacity


LEAVING = "optimizer, leaving"  # the row of what is copied to host memory while the engines receive weights


def leaves_behind(peaks: Iterable[Peak]) -> bool:
    """Whether the policy's optimizer state leaves the device while the engines receive weights: a row counts it."""
    return any(row.part == LEAVING for peak in peaks for row in peak.rows)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run needs, and whether the cluster has it.

    title, layout: in words, for people.
    num_nodes, num_gpus: nodes, and devices of the whole run; on CPU, processes.
    num_parameters: of the policy.
    peaks: the memory of each phase and place.
    seconds: of a step, by part.
    calibration: how far they may be from real ones.
    violations: why the run does not fit; empty if it fits.
    concurrency: how many sequences of the greatest length a rollout engine's cache holds; None without rollout.
    tokens: of a step, by kind.
    notes: remarks for the user that are no violations.  gains: what settings save.
    form: which tensors quantised engines hold in which form; "": all plain.
    """

    title: str
    layout: str
    num_nodes: int
    num_gpus: int
    num_parameters: int
    peaks: tuple[Peak, ...]
    seconds: dict[str, float]
    calibration: Calibration
    violations: list[Violation]
    concurrency: float | None = None
    tokens: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    gains: tuple[str, ...] = ()
    form: str = ""

    @property
    def fits(self) -> bool:
        """True if there is no violation."""
        return not self.violations

    @property
    def step_s(self) -> float:
        """Expected seconds of a step."""
        return sum(self.seconds.values())

    @property
    def step_range_s(self) -> tuple[float, float]:
        """The least and the most seconds of a step that are to be expected."""
        return self.calibration.range_s(self.step_s)

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows of all peaks."""
        return tuple(row for peak in self.peaks for row in peak.rows)

    def peak(self, phase: Phase, place: Place = Place.device) -> Peak | None:
        """The peak of one phase and place; None if the plan has none."""
        return next((each for each in self.peaks if (each.phase, each.place) == (phase, place)), None)
