"""What of a curve is drawn: its bins, its smoothed line, and where an axis is cut.  No picture is made here.

Bins are ranges of steps, the same for all curves of a chart, so that a curve with few points keeps them all.  A
smoothed value is the mean of the values around it, near ones counting more, as many before as after, so that it does
not lag; at the ends there are fewer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

MAX_BINS = 240  # of a chart; a finer line is not seen
MIN_SMOOTHED = 20  # values; fewer are read without help
FINE = 1e6  # bins of a chart by hours whose points each have their own
WINDOW = 0.05  # of the values, in a smoothed one
Point = tuple[float, float | None]
_Floats = NDArray[np.float64]
_Starts = NDArray[np.intp]


@dataclass(frozen=True)
class Series:
    """One line.  points: (step, number), None is a gap.  intervals: step -> (low, high) around its point.

    smooth: draw the mean of the values around each over the values, if they are many.  colour: an index of the page's
    palette; None: that of its place in the chart.
    """

    label: str
    points: Sequence[Point]
    intervals: dict[float, tuple[float, float]] = field(default_factory=dict)
    smooth: bool = False
    colour: int | None = None


@dataclass(frozen=True)
class StepBin:
    """The values of some steps, ``first`` to ``last``.  mean, low, high: of the numbers; None where there are none.

    smooth: the mean of their smoothed values; None if the line is not smoothed.
    """

    first: float
    last: float
    mean: float | None
    low: float | None
    high: float | None
    smooth: float | None

    @property
    def place(self) -> float:
        """Where it is drawn, as a step."""
        return (self.first + self.last) / 2


def bin_width(series: Iterable[Series], *, hours: bool = False) -> float:
    """How many steps, or hours, a bin of the chart of ``series`` covers: 1 step while each may have its own."""
    places = [place for each in series for place, _ in each.points]
    most = max((len(each.points) for each in series), default=0)
    if hours:
        return (max(places) - min(places) or 1.0) / (MAX_BINS if most > MAX_BINS else FINE)
    return 1 if most <= MAX_BINS else math.ceil((max(places) - min(places) + 1) / MAX_BINS)


def spans_decades(values: Sequence[float]) -> bool:
    """Whether nine tenths of ``values``, all above 0, span three powers of ten: a linear axis hides the small ones."""
    ordered = sorted(values)
    lower = ordered[math.ceil(0.05 * (len(ordered) - 1))]
    upper = ordered[math.floor(0.95 * (len(ordered) - 1))]
    return len(ordered) >= MIN_SMOOTHED and ordered[0] > 0 and upper >= 1000 * lower


def bins(series: Series, origin: float, width: float) -> list[StepBin]:
    """The bins of ``series`` that have points, in order; ``width`` steps each, the first from ``origin``."""
    if not series.points:
        return []
    steps = np.array([step for step, _ in series.points])
    values = _array([value for _, value in series.points])
    starts = np.flatnonzero(np.diff(np.floor((steps - origin) / width), prepend=-1.0))
    columns = [steps[starts], steps[np.append(starts[1:], len(steps)) - 1], _mean_of_each(values, starts)]
    columns += [np.fmin.reduceat(values, starts), np.fmax.reduceat(values, starts)]
    if series.smooth and np.isfinite(values).sum() >= MIN_SMOOTHED:
        columns.append(_mean_of_each(_smooth(values), starts))
    else:
        columns.append(np.full(len(starts), np.nan))
    first, last, *numbers = (column.tolist() for column in columns)
    told = ([None if math.isnan(value) else value for value in column] for column in numbers)
    return [StepBin(*row) for row in zip(first, last, *told, strict=True)]


def _array(values: Sequence[float | None]) -> _Floats:
    return np.array([math.nan if value is None else value for value in values])


def _mean_of_each(values: _Floats, starts: _Starts) -> _Floats:
    """The mean of the numbers from each start to the next; NaN where there is none."""
    there = np.isfinite(values)
    sums, counts = (np.add.reduceat(each, starts) for each in (np.where(there, values, 0.0), there.astype(float)))
    means: _Floats = np.divide(sums, counts, out=np.full(len(starts), np.nan), where=counts > 0)
    return means


def window(count: int) -> int:
    """How many of ``count`` values make a smoothed one: 5, 9, 13, ..."""
    return 4 * max(1, round(WINDOW * count / 4)) + 1


def smooth(values: Sequence[float | None]) -> list[float | None]:
    """The weighted mean of the numbers around each; None for None, and for all if they are few.

    The weights fall from the middle to the ends of the window in a straight line: it is the mean of means.
    """
    numbers = _array(values)
    if np.isfinite(numbers).sum() < MIN_SMOOTHED:
        return [None] * len(values)
    return [None if math.isnan(value) else value for value in _smooth(numbers).tolist()]


def _smooth(values: _Floats) -> _Floats:
    """``values`` smoothed; NaN stays where it is, and counts for nothing."""
    there = np.isfinite(values)
    numbers = values[there]
    half = window(len(numbers)) // 4
    smoothed = np.full(len(values), np.nan)
    smoothed[there] = _means(_means(numbers, half), half)
    return smoothed


def _means(numbers: _Floats, half: int) -> _Floats:
    """The mean of each number and of ``half`` on either side, as far as there are."""
    sums = np.concatenate([[0.0], np.cumsum(numbers)])
    at = np.arange(len(numbers))
    starts = np.maximum(at - half, 0)
    ends = np.minimum(at + half + 1, len(numbers))
    return np.asarray((sums[ends] - sums[starts]) / (ends - starts))


def axis_ends(values: Sequence[float]) -> tuple[float, float]:
    """The least and the greatest of ``values``, without the few that would make a flat line of all others.

    Left out are at most two, or one in 500: those that are farther from nine tenths of the values than four times the
    range of these.  A chart says how many it leaves out.
    """
    ordered = sorted(values)
    lower = ordered[math.ceil(0.05 * (len(ordered) - 1))]
    upper = ordered[math.floor(0.95 * (len(ordered) - 1))]
    reach = 4 * (upper - lower)
    near = [value for value in ordered if lower - reach <= value <= upper + reach]
    few = 0 < len(ordered) - len(near) <= max(2, len(ordered) // 500)
    if len(ordered) < MIN_SMOOTHED or reach <= 0 or not few:
        return ordered[0], ordered[-1]
    return near[0], near[-1]
