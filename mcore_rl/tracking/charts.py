"""Line charts and stacked bars as SVG text, coloured by the page's style sheet.

A chart is ``WIDTH`` by ``HEIGHT`` units and scales to its column.  The numbers under the pointer are written here, for
every position; the page's script only looks up the nearest one.  Many steps become bins (``chart_points``): a band from
the lowest to the highest value of each, and a line through the means.  An axis has ticks at both ends; what lies beyond
it is marked at its edge and counted in the caption.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from mcore_rl.tracking.chart_points import Series, StepBin, axis_ends, bin_width, bins, spans_decades
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
_Rows = dict[tuple[float, float], list[str]]  # first and last step -> numbers as text, "" where there is none


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
    smoothed = any(each.smooth is not None for each in curve.bins)
    if any(each.last > each.first for each in curve.bins):
        for run in _runs(curve.bins) if banded else []:
            tops = [f"{x(each.place):.1f},{y.inside(each.high or 0.0):.1f}" for each in run]
            bottoms = [f"{x(each.place):.1f},{y.inside(each.low or 0.0):.1f}" for each in run]
            elements.append(f'<polygon class="band" points="{" ".join(tops + bottoms[::-1])}"/>')
        elements += [_polyline([(x(b.place), y.inside(_shown(b))) for b in run], "") for run in _runs(curve.bins)]
    else:
        raw = [[(x(each.place), y.inside(each.mean or 0.0)) for each in run] for run in _runs(curve.bins)]
        elements += [_polyline(run, ' class="raw"' if smoothed else "") for run in raw]
        if smoothed:
            elements += [_polyline([(x(b.place), y.inside(_shown(b))) for b in run], "") for run in _runs(curve.bins)]
        few = sum(map(len, raw)) <= MAX_MARKED and not smoothed
        elements += [_dot(*point) for run in raw if few or len(run) == 1 for point in run]
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
        "start": x.start, "low": x.low, "apart": round((x.end - x.start) / (x.high - x.low), 6),
        "names": names, "rows": [[*(round(place, 5) for place in at), *rows[at]] for at in sorted(rows, key=sum)],
    }  # fmt: skip
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
