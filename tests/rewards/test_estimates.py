"""pass@k and maj@k by hand and by counting every draw; intervals against published numbers and the normal limit."""

from __future__ import annotations

import math
from itertools import combinations, product
from statistics import NormalDist

import numpy as np
import pytest

from mcore_rl.rewards.estimates import Z, interval, majority, majority_at_k, pass_at_k


def test_the_quantile() -> None:
    assert pytest.approx(NormalDist().inv_cdf(0.975), abs=1e-12) == Z


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (4, 2, 1, 1 / 2),
        (4, 2, 2, 1 - 1 / 6),  # of 6 pairs one has no right response
        (4, 2, 3, 1.0),  # there are only two wrong ones
        (5, 1, 2, 1 - 6 / 10),
        (10, 3, 5, 1 - 21 / 252),
        (3, 0, 3, 0.0),
        (3, 3, 1, 1.0),
        (200, 1, 100, 0.5),
    ],
)
def test_pass_at_k_by_hand(n: int, c: int, k: int, expected: float) -> None:
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-15)


def test_pass_at_k_is_the_share_of_draws_with_a_right_response() -> None:
    for n in range(1, 7):
        for c, k in product(range(n + 1), range(1, n + 1)):
            draws = list(combinations([True] * c + [False] * (n - c), k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-15)


def test_pass_at_k_of_many_samples_is_exact() -> None:
    """The product form, 1 - prod(1 - k / i), in logarithms; C(5000, 2500) itself is no float."""
    n, c, k = 5000, 3, 2500
    logs = math.fsum(math.log1p(-k / i) for i in range(n - c + 1, n + 1))
    assert pass_at_k(n, c, k) == pytest.approx(1 - math.exp(logs), rel=1e-12)


@pytest.mark.parametrize(
    ("answers", "right", "expected"),
    [
        (["4", "4", "5"], "++-", 1.0),
        (["4", "5", "5"], "+--", 0.0),
        (["4", "5"], "+-", 0.5),  # a tie
        (["4", "5", "6"], "+--", 1 / 3),
        (["4", "5", "5", "4", "6"], "+--+-", 0.5),
        (["1/2", "0.5", "7", "7", "7"], "++---", 0.0),
        (["1/2", "0.5", "7"], "++-", 1.0),  # one answer in two spellings
        ([None, None, "4"], "--+", 1.0),  # who says nothing has no vote
        ([None, None, "5"], "---", 0.0),
        ([None, None], "--", 0.0),
        ([None, None, "5"], "++-", 1.0),  # right without a name is right
        (["5"], "-", 0.0),
    ],
)
def test_the_majority(answers: list[str | None], right: str, expected: float) -> None:
    assert majority(answers, [each == "+" for each in right]) == pytest.approx(expected, abs=1e-15)


def test_maj_at_k_is_the_mean_of_disjoint_votes() -> None:
    answers, right = ["4", "5", "5", "4", "4", "4", "5"], [True, False, False, True, True, True, False]
    assert majority_at_k(answers, right, 1) == pytest.approx(4 / 7)
    assert majority_at_k(answers, right, 2) == pytest.approx((0.5 + 0.5 + 1) / 3)  # the seventh is left over
    assert majority_at_k(answers, right, 3) == pytest.approx((0 + 1) / 2)
    assert majority_at_k(answers, right, 7) == 1.0


@pytest.mark.parametrize(
    ("right", "of", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),  # Newcombe (1998), table I, method 3
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_as_published(right: int, of: int, low: float, high: float) -> None:
    estimate = interval([1.0] * right + [0.0] * (of - right))
    assert estimate.method == "wilson" and estimate.value == right / of
    assert (estimate.low, estimate.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


def test_the_bootstrap_is_the_normal_interval_of_many_prompts() -> None:
    values = np.random.default_rng(3).choice([0.0, 0.25, 1.0], size=2000).tolist()
    estimate, spread = interval(values), float(np.std(values)) / math.sqrt(len(values))
    assert estimate.method == "bootstrap" and estimate.value == pytest.approx(np.mean(values))
    assert estimate.low is not None and estimate.high is not None
    # 2000 resamples know a 2.5 % quantile to 0.06 standard deviations (binomial, at the normal density there).
    assert estimate.low == pytest.approx(estimate.value - Z * spread, abs=0.2 * spread)
    assert estimate.high == pytest.approx(estimate.value + Z * spread, abs=0.2 * spread)


def test_an_interval_is_the_same_every_time_and_needs_two_prompts() -> None:
    values = np.random.default_rng(5).random(50).tolist()
    assert interval(values) == interval(values)
    assert (interval([0.5]).value, interval([0.5]).low, interval([0.5]).high) == (0.5, None, None)
    assert interval([1.0]).method == "wilson"
