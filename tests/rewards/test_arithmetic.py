"""Arithmetic: half the reward for a right answer whose sums are false; all problems' own solutions get all of it."""

from __future__ import annotations

import pytest

from mcore_rl.config.reward import Gsm8kConfig, RewardConfig
from mcore_rl.data.arithmetic import LEVELS, Split, generate
from mcore_rl.rewards.arithmetic import false_sums, grade_arithmetic
from mcore_rl.rewards.score import RewardRequest, Score

CONFIG = RewardConfig(gsm8k=Gsm8kConfig(score=1.0, format_score=0.1))


def grade(response: str, truth: str = "9") -> Score:
    return grade_arithmetic(RewardRequest(("p", 0), "arithmetic", response, truth), CONFIG)


@pytest.mark.parametrize(
    ("response", "value", "correct", "sums"),
    [
        ("4 + 5 = 9\n#### 9", 1.0, 1.0, 1.0),
        ("#### 9", 1.0, 1.0, 1.0),  # nothing false is said
        ("4 + 4 = 9\n#### 9", 0.5, 1.0, 0.0),
        ("4 + 5 = 9\n9 - 1 = 9\n#### 9", 0.5, 1.0, 0.0),
        ("3*3=9\n#### 9", 1.0, 1.0, 1.0),
        ("4 + 4 = 8\n#### 8", 0.1, 0.0, 1.0),
        ("4 + 4 = 9\n#### 8", 0.1, 0.0, 0.0),
        ("4 + 4 = 9", 0.0, 0.0, 0.0),
    ],
)
def test_a_right_answer_under_a_false_sum_has_half(response: str, value: float, correct: float, sums: float) -> None:
    score = grade(response)
    assert (score.value, score.correct, score.parts["sums"]) == (value, correct, sums)


@pytest.mark.parametrize("difficulty", LEVELS)
def test_every_solution_of_the_data_is_wholly_right(difficulty: int) -> None:
    for each in generate(difficulty, 200, 1, Split.train):
        assert grade(each.solution, each.answer) == Score(
            1.0, {"format": 1.0, "sums": 1.0}, correct=1.0, answer=each.answer
        )
        assert false_sums(each.solution.replace("= ", "= 1", 1)), "the check sees a sum"


def test_what_is_no_sum_is_not_judged() -> None:
    assert false_sums("x = 3, 4 + = 9, 4 + 5, 1.5 + 2 = 9, 4 + 5 = nine") == ["5 + 2 = 9"]
    assert false_sums("5 - 9 = -4, 12345678901 + 1 = 2") == []
