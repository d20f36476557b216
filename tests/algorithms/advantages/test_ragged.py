"""Ragged sums against loops over lists, and the invariants that callers rely on."""

from __future__ import annotations

import math

import pytest
import torch

from mcore_rl.algorithms.advantages.ragged import (
    _SIDE_BY_SIDE,
    Spreads,
    Trained,
    at_tokens,
    discounted_sums,
    last_trained,
    sequence_counts,
    sequence_sums,
)
from tests.algorithms.cases import ALL


def test_sums_counts_and_last_tokens() -> None:
    for name, case in ALL.items():
        inputs = case.inputs()
        sums = sequence_sums(torch.tensor(case.at_tokens(case.trained(case.values)), dtype=torch.float64), case.lengths)
        assert sums.tolist() == pytest.approx([sum(row) for row in case.trained(case.values)], abs=1e-12), name
        counts_S = sequence_counts(inputs.mask_T, case.lengths)
        assert counts_S.tolist() == [sum(mask) for mask in case.masks]
        start, last = 0, []
        for mask in case.masks:
            last += [start + max(i for i, kept in enumerate(mask) if kept)] if any(mask) else []
            start += len(mask)
        assert last_trained(inputs.mask_T, case.lengths).tolist() == last, name


def test_at_tokens_repeats_by_length() -> None:
    assert at_tokens(torch.tensor([3, 5, 7]), (2, 0, 1)).tolist() == [3, 3, 7]


@pytest.mark.parametrize("factor", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("counts", [[], [0], [0, 0], [1], [3, 0, 1, 5, 5, 2], [0, 4, 0], [1, 1, 1]])
def test_discounted_sums(counts: list[int], factor: float) -> None:
    x_M = torch.randn(sum(counts), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    before = x_M.clone()
    expected, start = [], 0
    for count in counts:
        row = x_M[start : start + count].tolist()
        for t in reversed(range(count - 1)):
            row[t] += factor * row[t + 1]
        expected += row
        start += count
    sums_M = discounted_sums(x_M, torch.tensor(counts, dtype=torch.int64), factor)
    assert sums_M.tolist() == pytest.approx(expected, abs=1e-13)
    assert torch.equal(x_M, before)


def test_discounted_sums_of_more_sequences_than_go_side_by_side() -> None:
    counts = [index % 4 for index in range(2 * _SIDE_BY_SIDE + 5)]
    sums_M = discounted_sums(torch.ones(sum(counts)), torch.tensor(counts), 0.5)
    expected = {0: [], 1: [1.0], 2: [1.5, 1.0], 3: [1.75, 1.5, 1.0]}
    assert sums_M.tolist() == [x for count in counts for x in expected[count]]


@pytest.mark.parametrize("mask", [[], [1], [0], [1, 1], [0, 0, 0], [0, 1, 1, 0, 1], [1, 0, 0, 1, 1, 0], [1, 0, 1]])
def test_trained_tokens_are_taken_out_and_put_back(mask: list[int]) -> None:
    trained = Trained(torch.tensor(mask, dtype=torch.bool))
    x_T = torch.arange(1.0, len(mask) + 1)
    expected = [float(place + 1) for place, kept in enumerate(mask) if kept]
    assert trained.gather(x_T).tolist() == expected
    assert trained.count == len(expected)
    assert trained.scatter(trained.gather(x_T)).tolist() == [(place + 1.0) * kept for place, kept in enumerate(mask)]


def test_the_spread_of_all_is_put_together_from_the_spreads_of_each() -> None:
    x_M = torch.randn(1003, generator=torch.Generator().manual_seed(1)) + 5
    for counts in ([1003], [0, 400, 1, 0, 602, 0], [1] * 1003):
        spread, x = Spreads.of(x_M, torch.tensor(counts)).total(), [float(each) for each in x_M]
        assert spread is not None and spread.count == len(x)
        mean = math.fsum(x) / len(x)
        assert spread.mean == pytest.approx(mean, rel=1e-12)
        assert spread.variance == pytest.approx(math.fsum((each - mean) ** 2 for each in x) / len(x), rel=1e-12)
        assert (spread.low, spread.high) == (min(x), max(x))
    assert Spreads.of(x_M[:0], torch.tensor([0, 0])).total() is None


def test_the_spread_of_what_is_equal_within_a_sequence() -> None:
    x_S, counts_S = torch.tensor([0.3, -2.0, 9.0, 1.25]), torch.tensor([3, 1, 0, 4])
    expected = Spreads.of(x_S.repeat_interleave(counts_S), counts_S).total()
    assert Spreads.constant(x_S, counts_S).total() == expected


def test_equal_values_do_not_vary() -> None:
    spread = Spreads.of(torch.full((21,), 0.1), torch.tensor([7, 0, 13, 1])).total()
    assert spread is not None and spread.variance == 0.0
