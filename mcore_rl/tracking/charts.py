"""Line charts and stacked bars as SVG text, coloured by the page's style sheet.

A chart is ``WIDTH`` by ``HEIGHT`` units and scales to its column.  The numbers under the pointer are written here, for
every position; the page's script only looks up the nearest one.  An axis has ticks at both ends; what lies beyond it is
marked at its edge and counted in the caption.

Many steps become bins: a band from the lowest to the highest value of each, and a line through the means.  Bins are
ranges of steps, the same for all curves of a chart, so that a curve with few points keeps them all.  A smoothed value
is the mean of the values around it, near ones counting more, as many before as after, so that it does not lag; at the
ends there are fewer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcore_rl.ground.arrays import Float64Array
from mcore_rl.tracking.console import number
from mcore_rl.tracking.page import NUM_COLOURS

WIDTH = 420
HEIGHT = 240
LEFT = 56
RIGHT = 18
TOP = 10
BOTTOM = 34
MAX_BARS = 100
MAX_BANDS = 3  # curves of one chart; bands of more hide one another, and the numbers under the pointer tell the range
MAX_MARKED = 40  # points; more of them are a line
MAX_BINS = 240  # of a chart; a finer line is not seen
MIN_SMOOTHED = 20  # values; fewer are read without help
FINE = 1e6  # bins of a chart by hours whose points each have their own
WINDOW = 0.05  # of the values, in a smoothed one
Point = tuple[float, float | None]
_Starts = NDArray[np.intp]
_Rows = dict[tuple[float, float], list[str]]  # first and last step -> numbers as text, "" where there is none


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
    lower, upper = _nine_tenths(ordered)
    return len(ordered) >= MIN_SMOOTHED and ordered[0] > 0 and upper >= 1000 * lower


def _nine_tenths(ordered: Sequence[float]) -> tuple[float, float]:
    """The least and the greatest of the middle nine tenths."""
    last = len(ordered) - 1
    return ordered[math.ceil(0.05 * last)], ordered[math.floor(0.95 * last)]


def bins(series: Series, origin: float, width: float) -> list[StepBin]:
    """The bins of ``series`` that have points, in order; ``width`` steps each, the first from ``origin``."""
    if not series.points:
        return []
    steps = np.array([step for step, _ in series.points])
    values = np.array([math.nan if value is None else value for _, value in series.points])
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


def _mean_of_each(values: Float64Array, starts: _Starts) -> Float64Array:
    """The mean of the numbers from each start to the next; NaN where there is none."""
    there = np.isfinite(values)
    sums = np.add.reduceat(np.where(there, values, 0.0), starts)
    counts = np.add.reduceat(there.astype(float), starts)
    means: Float64Array = np.divide(sums, counts, out=np.full(len(starts), np.nan), where=counts > 0)
    return means


def window(count: int) -> int:
    """How many of ``count`` values make a smoothed one: 5, 9, 13, ..."""
    return 4 * max(1, round(WINDOW * count / 4)) + 1


def _smooth(values: Float64Array) -> Float64Array:
    """The weighted mean of the numbers around each; NaN stays where it is, and counts for nothing.

    The weights fall from the middle to the ends of the window in a straight line: it is the mean of means.
    """
    there = np.isfinite(values)
    numbers = values[there]
    half = window(len(numbers)) // 4
    smoothed = np.full(len(values), np.nan)
    smoothed[there] = _means(_means(numbers, half), half)
    return smoothed


def _means(numbers: Float64Array, half: int) -> Float64Array:
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
    lower, upper = _nine_tenths(ordered)
    reach = 4 * (upper - lower)
    near = [value for value in ordered if lower - reach <= value <= upper + reach]
    few = 0 < len(ordered) - len(near) <= max(2, len(ordered) // 500)
    if len(ordered) < MIN_SMOOTHED or reach <= 0 or not few:
        return ordered[0], ordered[-1]
    return near[0], near[-1]


@dataclass(frozen=True)
class Curve:
    """A series as it is drawn.  colour: index, below ``NUM_COLOURS``."""

    series: Series
    colour: int
    bins: Sequence[StepBin]


@dataclass(frozen=True)
class BarSeries:
    """One layer of stacked bars.  colour: index, below ``NUM_COLOURS``.  values: one per step."""

    label: str
    colour: int
    values: Sequence[float]


@dataclass(frozen=True)
class Scale:
    """Maps numbers to positions: ``low`` to ``start``, ``high`` to ``end``.  ticks: the numbers to mark.

    logarithmic: equal distances are equal ratios; all numbers are above 0.
    """

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        """The position of ``value``."""
        if self.logarithmic:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def inside(self, value: float) -> float:
        """The position of ``value``, or of the end that it lies beyond."""
        return self(min(max(value, self.low), self.high))


def ticks(low: float, high: float, most: int) -> tuple[float, ...]:
    """At most ``most`` (3 or more) round numbers, 1, 2 or 5 times a power of ten apart, that enclose low and high."""
    if low == high == 0:
        high = 1.0
    size = max(abs(low), abs(high))
    if high - low <= 1e-9 * size:  # one number, apart from rounding
        pad = size * 0.1 or 1.0
        low = low - pad
        high = high + pad
    raw = (high - low) / max(most - 1, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    for factor in (1, 2, 5, 10, 20, 50, 100):
        apart = factor * power
        first = math.floor(low / apart + 1e-9)
        last = math.ceil(high / apart - 1e-9)
        if last - first + 1 <= most:
            break
    return tuple(k * apart for k in range(first, last + 1))


def decades(low: float, high: float, most: int) -> tuple[float, ...]:
    """At most ``most`` powers of ten, equally many apart, that enclose low and high, which are above 0."""
    first = math.floor(math.log10(low))
    last = max(math.ceil(math.log10(high) - 1e-9), first + 1)
    apart = math.ceil((last - first) / (most - 1))
    return tuple(10.0**power for power in range(first, last + apart, apart))


def line_chart(
    title: str,
    unit: str,
    series: Sequence[Series],
    *,
    whole: bool = False,
    steps: tuple[float, float] | None = None,
    hours: bool = False,
    note: str = "",
) -> str:
    """A figure with a line per series, on one vertical axis; "" if no series has a number.

    The axis of a share begins at 0 %, so that a line is as high as its share.  whole: and ends at 100 %.  Numbers that
    span powers of ten have a logarithmic one.  hours: the horizontal axis, and the points, are hours and not steps.
    steps: the first and the last step of the horizontal axis, as other charts of the page have it; else those of the
    series.  note: what is measured, below the title.
    """
    numbers = [value for each in series for _, value in each.points if value is not None]
    if not numbers:
        return ""
    ends = axis_ends(numbers) if unit != "share" else (min(0.0, *numbers), max(1.0 if whole else 0.0, *numbers))
    bounds = [end for each in series for interval in each.intervals.values() for end in interval]
    places = [step for each in series for step, _ in each.points]
    first, last = steps or (min(places), max(places))
    logarithmic = unit != "share" and not bounds and spans_decades(numbers)
    ends = (min(numbers), max(numbers)) if logarithmic else ends
    low = min([ends[0], *bounds])
    high = max([ends[1], *bounds])
    x, y = _scales([first, last], low, high, whole=not hours, logarithmic=logarithmic)
    width = bin_width(series, hours=hours)
    colours = [index if each.colour is None else each.colour for index, each in enumerate(series)]
    curves = [
        Curve(each, colour % NUM_COLOURS, bins(each, min(places), width))
        for each, colour in zip(series, colours, strict=True)
    ]
    banded = len(series) <= MAX_BANDS
    lines = [f'<g class="series c{curve.colour}">{_line(curve, x, y, banded)}</g>' for curve in curves]
    rows: _Rows = {}
    for index, curve in enumerate(curves):
        for each in curve.bins:
            row = rows.setdefault((each.first, each.last), [""] * len(curves))
            row[index] = _said(each, curve.series, unit)
    beyond = [value for value in numbers if not y.low <= value <= y.high]
    bound = any(each.last > each.first for curve in curves for each in curve.bins)
    wide = f"{width:.2g} hours" if hours else f"{width} steps"
    notes = [note, f"band: lowest and highest of {wide}" if bound and banded else ""]
    notes.append("logarithmic axis" if logarithmic else "")
    if beyond:
        farthest = ", ".join(number(value, unit) for value in sorted({min(beyond), max(beyond)}))
        notes.append(f"{len(beyond)} of {len(numbers)} values lie beyond the axis (\u25b2\u25bc), up to {farthest}")
    names = [(curve.series.label, f"c{curve.colour}") for curve in curves]
    return _figure(title, unit, [_axes(x, y, unit, "hours" if hours else "step"), *lines], x, names, rows, notes, hours)


def stacked_bars(title: str, unit: str, steps: Sequence[int], parts: Sequence[BarSeries]) -> str:
    """A figure with a bar per step, stacked from ``parts``, the first at the bottom; "" if all are zero."""
    together = max(1, math.ceil(len(steps) / MAX_BARS))
    groups = [range(start, min(start + together, len(steps))) for start in range(0, len(steps), together)]
    heights = [[sum(part.values[i] for i in each) / len(each) for each in groups] for part in parts]
    totals = [sum(values[k] for values in heights) for k in range(len(groups))]
    if not totals or max(totals) <= 0:
        return ""
    ranges = [(float(steps[each[0]]), float(steps[each[-1]])) for each in groups]
    places = [(first + last) / 2 for first, last in ranges]
    x, y = _scales(places, 0.0, max(totals), margin=0.5 * together)
    wide = max(1.0, 0.8 * (x(together) - x(0.0)))
    drawn: list[str] = [_axes(x, y, unit, "step")]
    rows: _Rows = {}
    for k, place in enumerate(places):
        below = 0.0
        said = [f"{number(totals[k])} {unit}"]
        for part, values in zip(parts, heights, strict=True):
            said.append(number(values[k]) if values[k] > 0 else "")
            if values[k] > 0:
                top = y(below + values[k])
                bottom = y(below)
                drawn.append(
                    f'<rect class="c{part.colour}" x="{x(place) - wide / 2:.2f}" y="{top:.2f}" '
                    f'width="{wide:.2f}" height="{bottom - top:.2f}" data-value="{values[k]:.6g}"/>'
                )
                below += values[k]
        rows[ranges[k]] = said
    names = [("in all", ""), *((part.label, f"c{part.colour}") for part in parts)]
    note = f"means of {together} steps" if together > 1 else ""
    return _figure(title, unit, drawn, x, names, rows, [note])


def _scales(
    places: Sequence[float],
    low: float,
    high: float,
    margin: float = 0.0,
    *,
    whole: bool = True,
    logarithmic: bool = False,
) -> tuple[Scale, Scale]:
    """Scales of both axes.  whole: marks at whole numbers alone, of steps."""
    first = min(places) - margin
    last = max(places) + margin
    if last <= first:  # hours begin at 0
        first = first - 1 if whole else first
        last = last + 1
    marks = tuple(
        tick for tick in ticks(first, last, 7) if first <= tick <= last and (not whole or tick == round(tick))
    )
    nothing = 0.0 if 0 < low <= high / 2 else low  # start at 0 if that costs little height
    heights = decades(low, high, 6) if logarithmic else ticks(nothing, high, 6)
    return (
        Scale(first, last, LEFT, WIDTH - RIGHT, marks),
        Scale(heights[0], heights[-1], HEIGHT - BOTTOM, TOP, heights, logarithmic),
    )


def _axes(x: Scale, y: Scale, unit: str, name: str) -> str:
    """Grid, ticks and their texts.  name: of the horizontal axis."""
    elements = []
    for tick in y.ticks:
        place = f"{y(tick):.2f}"
        elements.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{place}" y2="{place}"/>')
        elements.append(f'<text class="y" x="{LEFT - 6}" y="{place}" dy="0.32em">{_tick(tick, y, unit)}</text>')
    for tick in x.ticks:
        place = f"{x(tick):.2f}"
        elements.append(f'<line class="axis" x1="{place}" x2="{place}" y1="{y.start}" y2="{y.start + 4}"/>')
        said = f"{tick:.0f}" if name == "step" else f"{tick:g}"
        elements.append(f'<text class="x" x="{place}" y="{y.start + 16}">{said}</text>')
    elements.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y.start}" y2="{y.start}"/>')
    elements.append(f'<text class="x" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 4}">{name}</text>')
    return "".join(elements)


def _tick(tick: float, scale: Scale, unit: str) -> str:
    """The text of a tick, with enough decimals to differ from its neighbours."""
    if scale.logarithmic:
        return f"{tick:g}"
    factor = 100 if unit == "share" else 1
    apart = factor * (scale.ticks[1] - scale.ticks[0])
    size = factor * max(abs(scale.low), abs(scale.high))
    if size >= 1e5 or size < 1e-3:
        return f"{factor * tick:.3g}"
    decimals = max(0, -math.floor(math.log10(apart) + 1e-9))
    return f"{factor * tick:.{decimals}f}" + ("%" if unit == "share" else "")


def _line(curve: Curve, x: Scale, y: Scale, banded: bool) -> str:
    """SVG of a curve: intervals, the band or the raw line, the smoothed line, marks at the edges, and few points."""
    elements = [
        f'<line class="interval" x1="{x(step):.1f}" x2="{x(step):.1f}" y1="{y(low):.1f}" y2="{y(high):.1f}"/>'
        for step, (low, high) in curve.series.intervals.items()
    ]
    runs = _runs(curve.bins)
    means = [[(x(each.place), y.inside(each.mean or 0.0)) for each in run] for run in runs]
    binned = any(each.last > each.first for each in curve.bins)
    smoothed = any(each.smooth is not None for each in curve.bins)
    if binned and banded:
        for run in runs:
            tops = [f"{x(each.place):.1f},{y.inside(each.high or 0.0):.1f}" for each in run]
            bottoms = [f"{x(each.place):.1f},{y.inside(each.low or 0.0):.1f}" for each in run]
            elements.append(f'<polygon class="band" points="{" ".join(tops + bottoms[::-1])}"/>')
    if smoothed and not binned:
        elements += [_polyline(points, ' class="raw"') for points in means]
    elements += [_polyline([(x(b.place), y.inside(_shown(b))) for b in run], "") for run in runs]
    if not binned:
        few = sum(map(len, means)) <= MAX_MARKED and not smoothed
        elements += [_dot(*point) for points in means if few or len(points) == 1 for point in points]
    for each in curve.bins:
        if each.high is not None and each.high > y.high:
            elements.append(_mark(x(each.place), y.end, -1))
        if each.low is not None and each.low < y.low:
            elements.append(_mark(x(each.place), y.start, 1))
    return "".join(elements)


def _shown(each: StepBin) -> float:
    """The value of the main line."""
    value = each.mean if each.smooth is None else each.smooth
    assert value is not None, "bins of a run have numbers"
    return value


def _runs(made: Sequence[StepBin]) -> list[list[StepBin]]:
    """``made`` in stretches without a gap."""
    runs: list[list[StepBin]] = [[]]
    for each in made:
        if each.mean is None:
            runs.append([])
        else:
            runs[-1].append(each)
    return [run for run in runs if run]


def _polyline(points: Sequence[tuple[float, float]], kind: str) -> str:
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline{kind} points="{places}"/>' if len(points) > 1 else ""


def _dot(x: float, y: float) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>'


def _mark(x: float, y: float, down: int) -> str:
    """A triangle at the edge: there is a value beyond it."""
    base = y - 3 * down
    tip = y + 4 * down
    return f'<polygon class="beyond" points="{x - 4:.1f},{base:.1f} {x + 4:.1f},{base:.1f} {x:.1f},{tip:.1f}"/>'


def _said(each: StepBin, series: Series, unit: str) -> str:
    """The numbers of a bin as text."""
    text = number(each.mean, unit)
    if each.last > each.first and each.low is not None:
        text += f" [{number(each.low, unit)}, {number(each.high, unit)}]"
    elif each.smooth is not None:
        text += f" (smooth {number(each.smooth, unit)})"
    if interval := series.intervals.get(each.first):
        text += f" [{number(interval[0], unit)}, {number(interval[1], unit)}]"
    return text


def _figure(
    title: str,
    unit: str,
    drawn: Sequence[str],
    x: Scale,
    names: Sequence[tuple[str, str]],
    rows: _Rows,
    notes: Sequence[str],
    hours: bool = False,
) -> str:
    """A figure.  names: label and class of each number of a row.  hours: the rows are at hours, not steps."""
    named = {"share": "%", "1": "", "reward": ""}.get(unit, unit)
    caption = f"<b>{escape(title)}</b>" + (f" <span>{escape(named)}</span>" if named else "")
    said = "; ".join(note for note in notes if note)
    keys = "".join(f'<li><i class="{colour}"></i>{escape(label)}</li>' for label, colour in names if colour)
    hover: dict[str, Any] = {
        "start": x.start,
        "low": x.low,
        "apart": round((x.end - x.start) / (x.high - x.low), 6),
        "names": names,
        "rows": [[*(round(place, 5) for place in at), *rows[at]] for at in sorted(rows, key=sum)],
    }
    if hours:
        hover["unit"] = "h"
    data = escape(json.dumps(hover, separators=(",", ":")), quote=True)
    return (
        f"<figure><figcaption>{caption}<output></output></figcaption>{f'<p>{escape(said)}</p>' if said else ''}"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" tabindex="0" aria-label="{escape(title, quote=True)}" '
        f'data-hover="{data}">{"".join(drawn)}'
        f'<line class="rule" x1="0" x2="0" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/></svg>'
        + (f"<ul>{keys}</ul>" if len(names) > 1 else "")
        + "</figure>"
    )
