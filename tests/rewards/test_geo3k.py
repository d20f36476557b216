r"""Geometry3K: nine tenths for the boxed answer, a tenth for the form, which is verl's pattern."""

from __future__ import annotations

import random
import re
import time

import pytest

from mcore_rl.config.reward import RewardConfig
from mcore_rl.rewards.geo3k import grade_geo3k, is_in_form
from mcore_rl.rewards.score import RewardRequest, Score

VERL = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)  # verl/utils/reward_score/geo3k.py


def score(response: str, ground_truth: str = "12") -> Score:
    return grade_geo3k(RewardRequest(("p", 0), "hiyouga/geometry3k", response, ground_truth), RewardConfig())


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("<think>a</think> \\boxed{12}", 1.0),
        ("<think>a\nb</think>\nIt is \\boxed{ 12.0 }.", 1.0),
        ("<think>a</think> \\boxed{13}", 0.1),
        ("\\boxed{12}", 0.9),
        (" <think>a</think> \\boxed{12}", 0.9),
        ("<think>\\boxed{12}</think> It is 12.", 0.9),
        ("<think>a</think> It is 12.", 0.0),  # what is in no box is no answer
        ("The answer is 12", 0.0),
        ("", 0.0),
    ],
)
def test_the_score_is_that_of_answer_and_form(response: str, value: float) -> None:
    graded = score(response)
    assert graded.value == pytest.approx(value, abs=1e-12)
    assert graded.correct == float(value >= 0.9) and graded.parts == {"format": float(value in (0.1, 1.0))}


def test_answers_are_compared_by_value() -> None:
    assert score("<think></think>\\boxed{\\frac{5\\sqrt{2}}{2}}", "\\frac { 5 \\sqrt { 2 } } { 2 }").value == 1.0
    assert score("<think></think>\\boxed{6}", "6.5").value == pytest.approx(0.1)


def test_the_form_is_verls_pattern() -> None:
    draw = random.Random(0)
    pieces = ["<think>", "</think>", "\\boxed{", "}", "x", "\n", "{", "\\boxed"]
    formed = 0
    for _ in range(20_000):
        text = "<think>" * draw.randint(0, 1) + "".join(draw.choice(pieces) for _ in range(draw.randint(0, 9)))
        assert is_in_form(text) == (VERL.fullmatch(text) is not None), text
        formed += is_in_form(text)
    assert formed > 200


def test_a_hostile_response_takes_no_time() -> None:
    began = time.perf_counter()
    assert not is_in_form("<think>" + "</think>\\boxed{" * 100_000)
    assert time.perf_counter() - began < 1
