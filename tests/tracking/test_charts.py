"""Numbers are read back from the SVG with its own axes: from places to the numbers that the ticks say."""

from __future__ import annotations

import json
import math
import random
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from mcore_rl.tracking.charts import MAX_BINS, BarSeries, Series, decades, line_chart, stacked_bars, ticks
from tests.tracking.pages import numbers_under_the_pointer

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
        assert x == pytest.approx(step, abs=0.01)  # places have one decimal: 350 units over 30 steps
        assert y == pytest.approx(value, abs=6 / 200 * 0.1)
    assert len(list(svg.iter("circle"))) == 30


def test_shares_are_in_percent_and_intervals_are_drawn_to_scale() -> None:
    series = Series("a", [(0.0, 0.1), (10.0, 0.6)], {0.0: (0.05, 0.2), 10.0: (0.5, 0.75)})
    svg = chart(line_chart("t", "share", [series]))
    y0, dy = axis(svg, "y")
    intervals = [each for each in svg.iter("line") if each.get("class") == "interval"]
    ends = [(y0 + dy * float(each.get("y1") or ""), y0 + dy * float(each.get("y2") or "")) for each in intervals]
    assert [end for pair in ends for end in pair] == pytest.approx([5, 20, 50, 75], abs=0.03)
    assert numbers_under_the_pointer(svg) == [
        ("step 0", {"a": "10.0% [5.0%, 20.0%]"}), ("step 10", {"a": "60.0% [50.0%, 75.0%]"})
    ]  # fmt: skip


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
    assert ("step 3", {"a": "nan"}) in numbers_under_the_pointer(svg)


def test_many_steps_are_means_of_several() -> None:
    points = [(float(step), float(step % 4)) for step in range(4 * MAX_BINS)]
    text = line_chart("t", "1", [Series("a", points)])
    svg = chart(text)
    (line,) = lines(svg)
    assert len(line) == MAX_BINS
    assert all(y == pytest.approx(1.5, abs=0.01) for _, y in line)
    assert "band: lowest and highest of 4 steps" in text
    y0, dy = axis(svg, "y")
    (band,) = (each for each in svg.iter("polygon") if each.get("class") == "band")
    edge = [y0 + dy * float(point.split(",")[1]) for point in (band.get("points") or "").split()]
    assert edge == pytest.approx([3.0] * MAX_BINS + [0.0] * MAX_BINS, abs=0.01)
    assert numbers_under_the_pointer(svg)[1] == ("steps 4 to 7", {"a": "1.500 [0.000, 3.000]"})


def test_a_curve_of_few_points_keeps_them_beside_one_of_many() -> None:
    many = Series("loss", [(float(step), 1.0) for step in range(10 * MAX_BINS)])
    few = Series("validation", [(float(step), float(step)) for step in range(0, 10 * MAX_BINS, 100)])
    shown = dict(numbers_under_the_pointer(chart(line_chart("t", "1", [many, few]))))
    assert shown["step 300"] == {"validation": "300"} and shown["steps 300 to 309"] == {"loss": "1.000 [1.000, 1.000]"}


def test_a_smoothed_line_lies_over_the_raw_one_and_is_the_mean_around() -> None:
    points = [(float(step), float(step % 2)) for step in range(40)]
    svg = chart(line_chart("t", "1", [Series("a", points, smooth=True)]))
    raw, smoothed = lines(svg)
    assert [each.get("class") for each in svg.iter("polyline")] == ["raw", None]
    assert [y for _, y in raw] == pytest.approx([y for _, y in points], abs=0.01)
    assert all(abs(y - 0.5) < 0.12 for _, y in smoothed[2:-2])  # a mean of means of three: 1/3, 2/3 in turns
    assert numbers_under_the_pointer(svg)[11] == ("step 11", {"a": "1.000 (smooth 0.556)"})
    assert list(svg.iter("circle")) == []


def test_the_axis_is_cut_where_few_values_lie_far_out_and_says_so() -> None:
    points = [(float(step), 1.0 + step % 3) for step in range(60)]
    points[7] = (7.0, 5000.0)
    text = line_chart("t", "1", [Series("a", points)])
    svg = chart(text)
    assert float([each.text or "" for each in svg.iter("text") if each.get("class") == "y"][-1]) < 10
    (mark,) = (each for each in svg.iter("polygon") if each.get("class") == "beyond")
    x0, dx = axis(svg, "x")
    assert x0 + dx * float((mark.get("points") or "").split()[-1].split(",")[0]) == pytest.approx(7, abs=0.02)
    assert "1 of 60 values lie beyond the axis (\u25b2\u25bc), up to 5000" in text
    assert ("step 7", {"a": "5000"}) in numbers_under_the_pointer(svg), "no number is lost"
    assert "beyond" not in line_chart("t", "1", [Series("a", points[:6])])


def test_numbers_over_powers_of_ten_have_a_logarithmic_axis() -> None:
    points = [(float(step), 10.0 ** (-6 + step / 10)) for step in range(41)]
    text = line_chart("t", "1", [Series("a", points)])
    svg = chart(text)
    marks = [(float(each.get("y") or ""), each.text) for each in svg.iter("text") if each.get("class") == "y"]
    assert [said for _, said in marks] == ["1e-06", "1e-05", "0.0001", "0.001", "0.01"]
    (bottom, _), *_, (top, _) = marks
    (drawn,) = svg.iter("polyline")
    heights = [float(point.split(",")[1]) for point in (drawn.get("points") or "").split()]
    powers = [-6 + (bottom - height) / (bottom - top) * 4 for height in heights]
    assert powers == pytest.approx([math.log10(value) for _, value in points], abs=0.002)  # places have one decimal
    assert "logarithmic axis" in text
    assert "logarithmic" not in line_chart("t", "share", [Series("a", points)]), "shares begin at 0 %"
    assert "logarithmic" not in line_chart("t", "1", [Series("a", [*points, (41.0, 0.0)])])


def test_decades_enclose_and_are_few() -> None:
    assert decades(2e-3, 5.0, 6) == pytest.approx((1e-3, 1e-2, 1e-1, 1, 10))
    assert decades(1e-12, 1e3, 6) == pytest.approx((1e-12, 1e-9, 1e-6, 1e-3, 1, 1e3))
    assert decades(1.0, 1.0, 6) == (1.0, 10.0)


def test_points_may_be_at_hours() -> None:
    svg = chart(line_chart("t", "1", [Series("a", [(0.05, 1.0), (0.1, 3.0)])], steps=(0.0, 0.1), hours=True))
    assert [each.text for each in svg.iter("text") if each.get("class") == "x"] == [
        "0", "0.02", "0.04", "0.06", "0.08", "0.1", "hours"
    ]  # fmt: skip
    hover = json.loads(svg.get("data-hover") or "")
    assert hover["unit"] == "h" and [row[:2] for row in hover["rows"]] == [[0.05, 0.05], [0.1, 0.1]]
    many = line_chart("t", "1", [Series("a", [(hour / 100, 1.0 + hour) for hour in range(1000)])], hours=True)
    assert "band: lowest and highest of 0.042 hours" in many  # 9.99 hours in 240 bins


def test_charts_of_a_page_may_share_their_steps() -> None:
    svg = chart(line_chart("t", "1", [Series("a", [(5.0, 1.0), (6.0, 2.0)])], steps=(0.0, 20.0)))
    marks = [each.text for each in svg.iter("text") if each.get("class") == "x"]
    assert marks[0] == "0" and marks[-2:] == ["20", "step"]


def test_several_series_have_a_legend_and_their_own_steps() -> None:
    text = line_chart("t", "nats", [Series("<a>", [(1.0, 1.0), (2.0, 2.0)]), Series("b", [(2.0, 0.0), (3.0, 1.0)])])
    assert [item.text or "".join(item.itertext()) for item in ElementTree.fromstring(text).iter("li")] == ["<a>", "b"]
    assert numbers_under_the_pointer(chart(text)) == [
        ("step 1", {"<a>": "1.000"}), ("step 2", {"<a>": "2.000", "b": "0.000"}), ("step 3", {"b": "1.000"})
    ]  # fmt: skip


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
    assert "means of 10 steps" in text
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
