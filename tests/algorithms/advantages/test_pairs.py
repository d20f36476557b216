"""Which response is preferred to which."""

from __future__ import annotations

from random import Random

from mcore_rl.algorithms.advantages.pairs import Pair, best_worst, true_answer


def test_the_best_is_preferred_to_the_worst() -> None:
    assert best_worst([0.5, 1.0, 0.0, 0.25]) == [Pair(1, 2)]
    assert best_worst([0.0, 1.0]) == [Pair(1, 0)] and best_worst([1.0, 0.0]) == [Pair(0, 1)]
    assert best_worst([-2.0, -1.0]) == [Pair(1, 0)]


def test_of_equal_ones_it_is_the_first() -> None:
    assert best_worst([0.0, 1.0, 0.0, 1.0]) == [Pair(1, 0)]


def test_equal_scores_and_single_responses_make_no_pair() -> None:
    for scores in ([], [1.0], [0.5, 0.5], [0.0] * 8):
        assert best_worst(scores) == []


def test_best_and_worst_bound_every_score() -> None:
    draw = Random(0)
    for _ in range(200):
        scores = [draw.choice((0.0, 0.5, 1.0, draw.random())) for _ in range(draw.randint(2, 9))]
        for chosen, rejected in best_worst(scores):
            assert chosen is not None and scores[chosen] == max(scores) > min(scores) == scores[rejected]


def test_the_row_s_own_answer_is_preferred_to_each_response_whatever_it_scored() -> None:
    assert true_answer([1.0, 0.0]) == [Pair(None, 0), Pair(None, 1)] and true_answer([]) == []
