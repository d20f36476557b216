from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import fmean

import pytest

from mcore_rl.tracking.charts import (
    MAX_BINS,
    Series,
    axis_ends,
    bin_width,
    bins,
    spans_decades,
    window,
)


def smooth(values: Sequence[float | None]) -> list[float | None]:
    """The smoothed line of a chart that has a bin for each value."""
    series = Series("a", [(float(step), value) for step, value in enumerate(values)], smooth=True)
    return [each.smooth for each in bins(series, 0.0, 1.0)]


def test_a_smoothed_value_is_the_mean_of_means_around_it() -> None:
    noise = random.Random(0)
    values = [noise.gauss(0, 1) for _ in range(100)]
    assert window(100) == 5
    once = [fmean(values[max(at - 1, 0) : at + 2]) for at in range(100)]
    assert smooth(values) == pytest.approx([fmean(once[max(at - 1, 0) : at + 2]) for at in range(100)], abs=1e-12)


@pytest.mark.parametrize("count", [20, 33, 400, 10_000])
def test_a_straight_line_stays_where_it_is_between_the_ends(count: int) -> None:
    """The same weights before and after: nothing lags behind."""
    half = window(count) // 2
    line = smooth([2.0 * k + 1 for k in range(count)])
    assert line[half : count - half] == pytest.approx([2.0 * k + 1 for k in range(half, count - half)], rel=1e-9)
    assert smooth([5.0] * count) == pytest.approx([5.0] * count)


def test_few_values_are_not_smoothed_and_gaps_stay() -> None:
    assert smooth([1.0] * 19) == [None] * 19
    values = [None if k % 7 == 3 else 1.0 for k in range(40)]
    assert smooth(values) == values


def test_bins_hold_every_value_once() -> None:
    noise = random.Random(1)
    points = [(float(step), noise.random()) for step in range(5, 5 + 3 * MAX_BINS + 11)]
    series = Series("a", points)
    width = bin_width([series])
    made = bins(series, 5.0, width)
    assert width == 4 and len(made) <= MAX_BINS
    values = dict(points)
    for each in made:
        inside = [values[float(step)] for step in range(int(each.first), int(each.last) + 1)]
        assert (each.mean, each.low, each.high) == (pytest.approx(fmean(inside)), min(inside), max(inside))
    assert sum(int(each.last - each.first) + 1 for each in made) == len(points)


def test_points_at_hours_keep_their_own_place_unless_they_are_many() -> None:
    few = Series("a", [(hour / 7, 1.0) for hour in range(MAX_BINS)])
    assert len(bins(few, 0.0, bin_width([few], hours=True))) == MAX_BINS
    many = Series("a", [(hour / 7, 1.0) for hour in range(5 * MAX_BINS)])
    assert len(bins(many, 0.0, bin_width([many], hours=True))) <= MAX_BINS + 1


@pytest.mark.parametrize(
    ("values", "spans"),
    [
        ([10.0 ** (-step / 10) for step in range(41)], True),
        ([1.0 + step for step in range(60)], False),
        ([*[1.0] * 60, 5e6], False),  # one spike is not a range
        ([10.0 ** (-step / 10) for step in range(10)], False),  # few
        ([0.0, *(10.0 ** (-step / 10) for step in range(41))], False),  # nothing has no place
    ],
)
def test_what_spans_powers_of_ten(values: list[float], spans: bool) -> None:
    assert spans_decades(values) is spans


def test_a_bin_without_a_number_is_a_gap() -> None:
    (only,) = bins(Series("a", [(0.0, None), (1.0, None)]), 0.0, 2)
    assert (only.first, only.last, only.mean, only.low, only.smooth) == (0, 1, None, None, None)


@pytest.mark.parametrize(
    ("values", "ends"),
    [
        ([*map(float, range(40)), 1e6], (0.0, 39.0)),
        ([*map(float, range(40)), -500.0, 1e6], (0.0, 39.0)),
        ([*map(float, range(40)), 60.0], (0.0, 60.0)),  # not so far
        ([*map(float, range(40)), 1e6, 2e6, 3e6], (0.0, 3e6)),  # not so few
        ([0.0] * 40 + [1.0], (0.0, 1.0)),  # all else is one number: the value is the story
        ([1.0, 2.0, 500.0], (1.0, 500.0)),  # too few to say what is usual
        ([5.0] * 3 + [1.0 + k / 1000 for k in range(1000)], (1.0, 5.0)),  # how a run begins is no accident
    ],
)
def test_an_axis_leaves_out_few_far_values_alone(values: list[float], ends: tuple[float, float]) -> None:
    random.Random(2).shuffle(values)
    assert axis_ends(values) == ends
