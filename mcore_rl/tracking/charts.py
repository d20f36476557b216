"""Line charts and stacked bars as SVG text, coloured by the page's style sheet.

A chart is ``WIDTH`` by ``HEIGHT`` units and scales to its column.  The text under the pointer is made here, for every
position, so that the page's script only looks up the nearest one.  More than ``MAX_POINTS`` positions become bins of
their means, and the caption mentions it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from mcore_rl.tracking.console import number
from mcore_rl.tracking.page import NUM_COLOURS

WIDTH, HEIGHT = 420, 240
LEFT, RIGHT, TOP, BOTTOM = 52, 18, 10, 34
MAX_POINTS = 300
MAX_MARKED = 40  # points; more of them are a line
Point = tuple[float, float | None]


@dataclass(frozen=True)
class Series:
    """One line.  points: (step, number), None is a gap.  intervals: step -> (low, high) around its point."""

    label: str
    points: Sequence[Point]
    intervals: dict[float, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class BarSeries:
    """One layer of stacked bars.  colour: index, below ``NUM_COLOURS``.  values: one per step."""

    label: str
    colour: int
    values: Sequence[float]


@dataclass(frozen=True)
class Scale:
    """Maps numbers to positions: ``low`` to ``start``, ``high`` to ``end``.  ticks: the numbers to mark."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]

    def __call__(self, value: float) -> float:
        """The position of ``value``."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def ticks(low: float, high: float, most: int) -> tuple[float, ...]:
    """At most ``most`` (3 or more) round numbers, 1, 2 or 5 times a power of ten apart, that enclose low and high."""
    if low == high == 0:
        high = 1.0
    size = max(abs(low), abs(high))
    if high - low <= 1e-9 * size:  # one number, apart from rounding
        pad = size * 0.1 or 1.0
        low, high = low - pad, high + pad
    raw = (high - low) / max(most - 1, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    for factor in (1, 2, 5, 10, 20, 50, 100):
        apart = factor * power
        first, last = math.floor(low / apart + 1e-9), math.ceil(high / apart - 1e-9)
        if last - first + 1 <= most:
            break
    return tuple(k * apart for k in range(first, last + 1))


def line_chart(title: str, unit: str, series: Sequence[Series], *, whole: bool = False) -> str:
    """A figure with a line per series, on one vertical axis; "" if no series has a number.

    The axis of a share begins at 0 %, so that a line is as high as its share.  whole: and ends at 100 %.
    """
    thinned, together = _thinned(series)
    numbers = [value for each in thinned for _, value in each.points if value is not None]
    numbers += [end for each in thinned for interval in each.intervals.values() for end in interval]
    steps = sorted({step for each in thinned for step, _ in each.points})
    if not numbers:
        return ""
    if unit == "share":
        numbers.append(0.0)
    if whole:
        numbers.append(1.0)
    x, y = _scales(steps, min(numbers), max(numbers))
    drawn = [_axes(x, y, unit)]
    for index, each in enumerate(thinned):
        drawn.append(f'<g class="series c{index % NUM_COLOURS}">{_line(each, x, y)}</g>')
    hover = []
    for step in steps:
        lines = [f"step {_step(step, together)}"]
        lines += [f"{each.label}: {_said(each, step, unit)}" for each in thinned if _said(each, step, unit)]
        hover.append((x(step), "\n".join(lines)))
    legend = [(each.label, f"c{index % NUM_COLOURS}") for index, each in enumerate(thinned)] if len(thinned) > 1 else []
    return _figure(title, unit, drawn, hover, legend, together)


def stacked_bars(title: str, unit: str, steps: Sequence[int], parts: Sequence[BarSeries]) -> str:
    """A figure with a bar per step, stacked from ``parts``, the first at the bottom; "" if all are zero."""
    together = max(1, math.ceil(len(steps) / (MAX_POINTS // 3)))
    bins = [range(start, min(start + together, len(steps))) for start in range(0, len(steps), together)]
    heights = [[sum(part.values[i] for i in each) / len(each) for each in bins] for part in parts]
    totals = [sum(values[k] for values in heights) for k in range(len(bins))]
    if not totals or max(totals) <= 0:
        return ""
    places = [float(steps[each[0]]) for each in bins]
    x, y = _scales(places, 0.0, max(totals), margin=0.5 * together)
    wide = max(1.0, 0.8 * (x(together) - x(0.0)))
    drawn, hover = [_axes(x, y, unit)], []
    for k, place in enumerate(places):
        below, lines = 0.0, [f"step {_step(place, together)}: {number(totals[k])} {unit}"]
        for part, values in zip(parts, heights, strict=True):
            if values[k] > 0:
                top, bottom = y(below + values[k]), y(below)
                drawn.append(
                    f'<rect class="c{part.colour}" x="{x(place) - wide / 2:.2f}" y="{top:.2f}" '
                    f'width="{wide:.2f}" height="{bottom - top:.2f}" data-value="{values[k]:.6g}"/>'
                )
                below += values[k]
                lines.append(f"{part.label}: {number(values[k])}")
        hover.append((x(place), "\n".join(lines)))
    legend = [(part.label, f"c{part.colour}") for part in parts]
    return _figure(title, unit, drawn, hover, legend, together)


def _thinned(series: Sequence[Series]) -> tuple[list[Series], int]:
    """(the series in bins, the number of steps in a bin)."""
    together = max(1, math.ceil(max((len(each.points) for each in series), default=0) / MAX_POINTS))
    return ([_binned(each, together) for each in series] if together > 1 else list(series)), together


def _binned(series: Series, together: int) -> Series:
    points: list[Point] = []
    for start in range(0, len(series.points), together):
        part = series.points[start : start + together]
        numbers = [value for _, value in part if value is not None]
        points.append((part[0][0], sum(numbers) / len(numbers) if numbers else None))
    return Series(series.label, points)


def _scales(steps: Sequence[float], low: float, high: float, margin: float = 0.0) -> tuple[Scale, Scale]:
    first, last = min(steps) - margin, max(steps) + margin
    if last <= first:
        first, last = first - 1, last + 1
    marks = tuple(tick for tick in ticks(first, last, 7) if first <= tick <= last and tick == round(tick))
    heights = ticks(0.0 if 0 < low <= high / 2 else low, high, 6)  # start at 0 if that costs little height
    return (
        Scale(first, last, LEFT, WIDTH - RIGHT, marks),
        Scale(heights[0], heights[-1], HEIGHT - BOTTOM, TOP, heights),
    )


def _axes(x: Scale, y: Scale, unit: str) -> str:
    elements = []
    for tick in y.ticks:
        place = f"{y(tick):.2f}"
        elements.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{place}" y2="{place}"/>')
        elements.append(f'<text class="y" x="{LEFT - 6}" y="{place}" dy="0.32em">{_tick(tick, y, unit)}</text>')
    for tick in x.ticks:
        place = f"{x(tick):.2f}"
        elements.append(f'<line class="axis" x1="{place}" x2="{place}" y1="{y.start}" y2="{y.start + 4}"/>')
        elements.append(f'<text class="x" x="{place}" y="{y.start + 16}">{tick:.0f}</text>')
    elements.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y.start}" y2="{y.start}"/>')
    elements.append(f'<text class="x" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 4}">step</text>')
    return "".join(elements)


def _tick(tick: float, scale: Scale, unit: str) -> str:
    """The text of a tick, with enough decimals to differ from its neighbours."""
    factor = 100 if unit == "share" else 1
    apart, size = factor * (scale.ticks[1] - scale.ticks[0]), factor * max(abs(scale.low), abs(scale.high))
    if size >= 1e5 or size < 1e-3:
        return f"{factor * tick:.3g}"
    decimals = max(0, -math.floor(math.log10(apart) + 1e-9))
    return f"{factor * tick:.{decimals}f}" + ("%" if unit == "share" else "")


def _line(series: Series, x: Scale, y: Scale) -> str:
    """SVG of a series: intervals, the line with its gaps, and the points if they are few."""
    elements = [
        f'<line class="interval" x1="{x(step):.2f}" x2="{x(step):.2f}" y1="{y(low):.2f}" y2="{y(high):.2f}"/>'
        for step, (low, high) in series.intervals.items()
    ]
    runs: list[list[str]] = [[]]
    for step, value in series.points:
        if value is None:
            runs.append([])
        else:
            runs[-1].append(f"{x(step):.2f},{y(value):.2f}")
    elements += [f'<polyline points="{" ".join(run)}"/>' for run in runs if len(run) > 1]
    few = sum(len(run) for run in runs) <= MAX_MARKED
    for cx, cy in (point.split(",") for run in runs if few or len(run) == 1 for point in run):
        elements.append(f'<circle cx="{cx}" cy="{cy}" r="2.5"/>')
    return "".join(elements)


def _said(series: Series, step: float, unit: str) -> str:
    """The number of ``series`` at ``step`` as text; "" if it has none."""
    values = [value for place, value in series.points if place == step]
    if not values:
        return ""
    text = number(values[-1], unit)
    if interval := series.intervals.get(step):
        text += f" [{number(interval[0], unit)}, {number(interval[1], unit)}]"
    return text


def _step(step: float, together: int) -> str:
    return f"{step:.0f}" if together == 1 else f"{step:.0f} and the next {together - 1}"


def _figure(
    title: str,
    unit: str,
    drawn: Sequence[str],
    hover: Sequence[tuple[float, str]],
    legend: Sequence[tuple[str, str]],
    together: int,
) -> str:
    named = {"share": "%", "1": "", "reward": ""}.get(unit, unit)
    caption = f"<b>{escape(title)}</b>" + (f" <span>{escape(named)}</span>" if named else "")
    if together > 1:
        caption += f" <span>(means of {together} steps)</span>"
    keys = "".join(f'<li><i class="{colour}"></i>{escape(label)}</li>' for label, colour in legend)
    data = escape(json.dumps([[round(place, 2), text] for place, text in hover]), quote=True)
    return (
        f"<figure><figcaption>{caption}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title, quote=True)}" data-hover="{data}">'
        f'{"".join(drawn)}<line class="rule" x1="0" x2="0" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/></svg>'
        + (f"<ul>{keys}</ul>" if keys else "")
        + "</figure>"
    )
