from __future__ import annotations

from fractions import Fraction
from math import comb, sqrt

import pytest

from mcore_rl.tracking.verdict import Accuracy, best, gain, sign_test, wilson


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (56, 70, 0.692, 0.877),  # Newcombe, Stat. Med. 17 (1998), table II, to three places
        (48, 80, 0.490, 0.700),
        (9, 10, 0.596, 0.982),
        (10, 10, 0.722, 1.0),
        (0, 10, 0.0, 0.278),
    ],
)
def test_wilsons_interval_is_the_published_one(successes: int, trials: int, low: float, high: float) -> None:
    assert wilson(successes, trials) == (pytest.approx(low, abs=6e-4), pytest.approx(high, abs=6e-4))


def test_wilsons_interval_by_hand() -> None:
    """p = 1/2, n = 4, z = 2: the middle is 1/2, the half width 2 sqrt(1/16 + 1/16) / 2 = sqrt(1/8)."""
    low, high = wilson(2, 4, z=2.0)
    assert (low, high) == (pytest.approx(0.5 - sqrt(1 / 8), abs=1e-12), pytest.approx(0.5 + sqrt(1 / 8), abs=1e-12))


def test_wilsons_ends_are_where_the_score_test_turns() -> None:
    """Each end is a proportion from which the observed one is exactly z standard errors away."""
    for successes, trials in ((3, 17), (170, 200), (1, 1319)):
        for end in wilson(successes, trials):
            assert abs(successes / trials - end) / sqrt(end * (1 - end) / trials) == pytest.approx(1.959964, abs=1e-5)


def test_no_trials_say_nothing() -> None:
    assert wilson(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize(("ups", "downs"), [(0, 0), (1, 0), (5, 0), (6, 0), (12, 5), (5, 12), (7, 7), (300, 240)])
def test_the_sign_test_is_exact(ups: int, downs: int) -> None:
    n, fewer = ups + downs, min(ups, downs)
    exact = min(Fraction(1), 2 * sum(Fraction(comb(n, k), 2**n) for k in range(fewer + 1)))
    assert sign_test(ups, downs) == pytest.approx(float(exact), rel=1e-10)


def test_a_gain_on_the_same_prompts_counts_who_changed() -> None:
    first = Accuracy(0, {str(k): float(k < 2) for k in range(20)})
    last = Accuracy(9, {str(k): float(1 <= k < 9) for k in range(20)})  # 7 learned, 1 lost
    gained = gain(first, last)
    assert gained.points == pytest.approx(0.3, abs=1e-12)
    assert gained.p == pytest.approx(2 * (1 + 8) / 2**8, rel=1e-12)
    assert not gained.significant
    assert "7 better, 1 worse" in gained.basis


def test_the_same_accuracy_can_be_no_change_and_a_loss_can_be_significant() -> None:
    first = Accuracy(0, {str(k): 1.0 for k in range(20)})
    assert gain(first, first) == gain(first, Accuracy(3, dict(first.by_prompt)))
    assert gain(first, first).p == 1 and not gain(first, first).significant
    lost = gain(first, Accuracy(5, {str(k): float(k > 9) for k in range(20)}))
    assert lost.significant and lost.points == -0.5


def test_different_prompts_are_compared_as_independent() -> None:
    """Newcombe, Stat. Med. 17 (1998) 873, table II, method 10: 56/70 against 48/80 is [0.0524, 0.3339]."""
    first = Accuracy(0, {f"a{k}": float(k < 48) for k in range(80)})
    last = Accuracy(1, {f"b{k}": float(k < 56) for k in range(70)})
    gained = gain(first, last)
    assert gained.p is None and gained.significant
    assert "+5.2 to +33.4 points" in gained.basis
    back = gain(last, first)
    assert back.significant and "-33.4 to -5.2 points" in back.basis
    few = gain(Accuracy(0, {"a": 0.0, "b": 1.0}), Accuracy(1, {"c": 1.0, "d": 1.0}))
    assert not few.significant


def test_samples_of_one_prompt_are_one_piece_of_evidence() -> None:
    accuracy = Accuracy(0, {"a": 0.75, "b": 0.25})
    assert accuracy.mean == 0.5 and accuracy.num_prompts == 2
    assert accuracy.interval == wilson(1, 2)


def test_the_best_is_the_first_of_equals() -> None:
    accuracy = best([Accuracy(0, {"a": 0.0}), Accuracy(1, {"a": 1.0}), Accuracy(2, {"a": 1.0})])
    assert accuracy.step == 1
