"""Numbers are read back from the SVG with its own axes: from places to the numbers that the ticks say."""

from __future__ import annotations

import json
import math
import random
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from mcore_rl.tracking.charts import MAX_POINTS, BarSeries, Series, line_chart, stacked_bars, ticks

Element = ElementTree.Element


def axis(svg: Element, kind: str) -> tuple[float, float]:
    """(offset, slope): number = offset + slope * place, from the first and the last tick's label."""
    labels = [text for text in svg.iter("text") if text.get("class") == kind and text.text != "step"]
    place = "y" if kind == "y" else "x"
    pairs = [(float(each.get(place) or ""), float((each.text or "").rstrip("%"))) for each in labels]
    (p0, v0), (p1, v1) = pairs[0], pairs[-1]
    slope = (v1 - v0) / (p1 - p0)
    return v0 - slope * p0, slope


def lines(svg: Element) -> list[list[tuple[float, float]]]:
    (x0, dx), (y0, dy) = axis(svg, "x"), axis(svg, "y")
    polylines = []
    for line in svg.iter("polyline"):
        places = [point.split(",") for point in (line.get("points") or "").split()]
        polylines.append([(x0 + dx * float(x), y0 + dy * float(y)) for x, y in places])
    return polylines


def chart(text: str) -> Element:
    svg = ElementTree.fromstring(text).find("svg")
    assert svg is not None
    return svg


def test_a_line_reads_back_as_its_numbers() -> None:
    points = [(float(step), 3 * math.sin(step / 3) - 1) for step in range(1, 31)]
    svg = chart(line_chart("t", "1", [Series("a", points)]))
    (line,) = lines(svg)
    for (step, value), (x, y) in zip(points, line, strict=True):
        assert x == pytest.approx(step, abs=0.01)  # places have two decimals: 350 units over 30 steps
        assert y == pytest.approx(value, abs=6 / 200 * 0.02)
    assert len(list(svg.iter("circle"))) == 30


def test_shares_are_in_percent_and_intervals_are_drawn_to_scale() -> None:
    series = Series("a", [(0.0, 0.1), (10.0, 0.6)], {0.0: (0.05, 0.2), 10.0: (0.5, 0.75)})
    svg = chart(line_chart("t", "share", [series]))
    y0, dy = axis(svg, "y")
    intervals = [each for each in svg.iter("line") if each.get("class") == "interval"]
    ends = [(y0 + dy * float(each.get("y1") or ""), y0 + dy * float(each.get("y2") or "")) for each in intervals]
    assert [end for pair in ends for end in pair] == pytest.approx([5, 20, 50, 75], abs=0.01)
    hover = json.loads(svg.get("data-hover") or "")
    assert [text for _, text in hover] == ["step 0\na: 10.0% [5.0%, 20.0%]", "step 10\na: 60.0% [50.0%, 75.0%]"]


@pytest.mark.parametrize("values", [(0.0, 0.0), (1.0, 1.0), (0.36, 0.67), (0.001, 0.002)], ids=str)
def test_axes_of_shares_begin_at_nothing_and_whole_ones_end_at_all(values: tuple[float, float]) -> None:
    """Also where all are 0 %, whose axis went from -100 % to 100 %."""
    series = [Series("a", list(enumerate(values)))]
    for whole in (True, False):
        svg = chart(line_chart("t", "share", series, whole=whole))
        labels = [each.text or "" for each in svg.iter("text") if each.get("class") == "y"]
        low, high = (float(text.rstrip("%")) for text in (labels[0], labels[-1]))
        assert low == 0 and 100 * max(values) <= high <= 100
        assert high == 100 or not whole


def test_what_is_always_nothing_has_no_negative_axis() -> None:
    svg = chart(line_chart("t", "updates", [Series("a", [(0.0, 0.0), (1.0, 0.0)])]))
    assert next(each.text for each in svg.iter("text") if each.get("class") == "y") == "0.0"


def test_a_number_that_is_none_is_a_gap() -> None:
    points = [(1.0, 1.0), (2.0, 2.0), (3.0, None), (4.0, 4.0), (5.0, None), (6.0, 6.0), (7.0, 7.0)]
    svg = chart(line_chart("t", "1", [Series("a", points)]))
    assert [len(line) for line in lines(svg)] == [2, 2]
    assert len(list(svg.iter("circle"))) == 5  # the lonely point is seen
    many = [(float(k), None if k in (49, 51) else 1.0) for k in range(100)]
    assert len(list(chart(line_chart("t", "1", [Series("a", many)])).iter("circle"))) == 1
    assert "step 3\\na: nan" in (svg.get("data-hover") or "")


def test_many_steps_are_means_of_several() -> None:
    points = [(float(step), float(step % 4)) for step in range(4 * MAX_POINTS)]
    text = line_chart("t", "1", [Series("a", points)])
    (line,) = lines(chart(text))
    assert len(line) == MAX_POINTS
    assert all(y == pytest.approx(1.5, abs=0.01) for _, y in line)
    assert "(means of 4 steps)" in text


def test_several_series_have_a_legend_and_their_own_steps() -> None:
    text = line_chart("t", "nats", [Series("<a>", [(1.0, 1.0), (2.0, 2.0)]), Series("b", [(2.0, 0.0), (3.0, 1.0)])])
    assert [item.text or "".join(item.itertext()) for item in ElementTree.fromstring(text).iter("li")] == ["<a>", "b"]
    hover = json.loads(chart(text).get("data-hover") or "")
    assert [said for _, said in hover] == ["step 1\n<a>: 1.000", "step 2\n<a>: 2.000\nb: 0.000", "step 3\nb: 1.000"]


@pytest.mark.parametrize("values", [[], [None, None]])
def test_no_number_is_no_chart(values: list[None]) -> None:
    assert line_chart("t", "1", [Series("a", [(float(k), value) for k, value in enumerate(values)])]) == ""
    assert line_chart("t", "1", []) == ""


def test_bars_are_as_high_as_their_seconds_and_stand_on_one_another() -> None:
    noise = random.Random(1)
    parts = [BarSeries(name, k, [noise.random() * 5 for _ in range(12)]) for k, name in enumerate(("a", "b", "c"))]
    svg = chart(stacked_bars("t", "s", range(1, 13), parts))
    y0, dy = axis(svg, "y")
    for k, part in enumerate(parts):
        bars = [bar for bar in svg.iter("rect") if bar.get("class") == f"c{k}"]
        heights = [-dy * float(bar.get("height") or "") for bar in bars]
        assert heights == pytest.approx(part.values, abs=15 / 190 * 0.02)
    tops = [y0 + dy * float(bar.get("y") or "") for bar in svg.iter("rect") if bar.get("class") == "c2"]
    assert tops == pytest.approx([sum(part.values[k] for part in parts) for k in range(12)], abs=15 / 190 * 0.02)
    bars = sorted((float(bar.get("x") or ""), float(bar.get("width") or "")) for bar in svg.iter("rect"))[::3]
    assert all(x + width < following for (x, width), (following, _) in pairwise(bars))


def test_many_bars_are_means_and_no_seconds_are_no_chart() -> None:
    text = stacked_bars("t", "s", range(1000), [BarSeries("a", 0, [float(k % 10) for k in range(1000)])])
    assert "(means of 10 steps)" in text
    assert [float(bar.get("data-value") or "") for bar in chart(text).iter("rect")] == [4.5] * 100
    assert stacked_bars("t", "s", [1, 2], [BarSeries("a", 0, [0.0, 0.0])]) == ""


@pytest.mark.parametrize("most", [3, 5, 6, 7])
def test_ticks_are_round_enclose_and_are_few(most: int) -> None:
    noise = random.Random(most)
    for _ in range(500):
        size = 10 ** noise.uniform(-9, 9)
        low, high = sorted((noise.gauss(0, size), noise.gauss(0, size)))
        places = ticks(low, high, most)
        assert 2 <= len(places) <= most
        apart = places[1] - places[0]
        assert places[0] <= low + 1e-8 * apart and places[-1] >= high - 1e-8 * apart
        digit = apart / 10 ** math.floor(math.log10(apart) + 1e-9)
        assert min(abs(digit - round_one) for round_one in (1, 2, 5)) < 1e-6


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.0), (4.0, 4.0), (-1e-9, -1e-9), (0.04, 0.04000000000000001)])
def test_one_number_has_an_axis_too(low: float, high: float) -> None:
    places = ticks(low, high, 6)
    assert places[0] < low <= high < places[-1] or (low == places[0] == 0 and high < places[-1])
    assert line_chart("t", "share", [Series("a", [(1.0, low), (2.0, high)])])
