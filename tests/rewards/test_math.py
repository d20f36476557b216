"""Mathematics by value: equal expressions, unequal ones, and no signals."""

from __future__ import annotations

import signal
import threading

import pytest

from mcore_rl.config.reward import RewardConfig
from mcore_rl.rewards.math import grade_math
from mcore_rl.rewards.score import RewardRequest, Score


def grade(response: str, ground_truth: object) -> Score:
    return grade_math(RewardRequest(("p", 0), "lighteval/MATH", response, ground_truth), RewardConfig())


@pytest.mark.parametrize(
    ("response", "ground_truth", "right"),
    [
        (r"so \boxed{\frac{1}{2}}", r"\frac12", True),
        (r"so \boxed{0.5}", r"\frac{1}{2}", True),
        (r"\boxed{50\%}", r"50\%", True),
        (r"\boxed{x^2-1}", "(x-1)(x+1)", True),
        (r"\boxed{\{2, 1\}}", r"\{1, 2\}", True),
        (r"\boxed{(3, \frac{\pi}{2})}", r"\left( 3, \frac{\pi}{2} \right)", True),
        (r"\boxed{204}", "204", True),
        (r"\boxed{204}", 204, True),
        (r"\boxed{204}", r"Adding up, \boxed{204}.", True),  # a whole solution
        ("The answer is 204.", "204", True),
        (r"not 7 but \boxed{204}, then 7", "204", True),
        (r"\boxed{\frac{1}{3}}", r"\frac12", False),
        (r"\boxed{x^2+1}", "(x-1)(x+1)", False),
        (r"\boxed{205}", "204", False),
        (r"\boxed{", "204", False),
        (r"\boxed{(1,2)}", "1<x<2", True),
        (r"\boxed{1<x<2}", "(1,2)", False),  # an interval is asked for
        ("no idea", "204", False),
        ("", "204", False),
    ],
)
def test_answers_are_compared_by_value(response: str, ground_truth: object, right: bool) -> None:
    score = grade(response, ground_truth)
    expected = Score(float(right), {"boxed": float(r"\boxed{" in response)}, correct=float(right), answer=score.answer)
    assert score == expected


@pytest.mark.parametrize(
    ("response", "answer"),
    [(r"so \boxed{ x^2 - 1 }", "x^2-1"), ("it is 204.", "204"), (r"\boxed{1} or \boxed{7}", "1,7"), ("no idea", None)],
)
def test_the_answer_is_what_is_compared_as_it_is_written(response: str, answer: str | None) -> None:
    assert grade(response, "204").answer == answer


def test_a_ground_truth_without_a_formula_is_named() -> None:
    with pytest.raises(ValueError, match=r"is no formula\. Correct reward_model.ground_truth"):
        grade(r"\boxed{1}", "")


def test_no_signal_is_used() -> None:
    """It works in a thread, where the library's own limits raise, and leaves the handler alone."""
    before = signal.getsignal(signal.SIGALRM)
    scores: list[Score] = []
    thread = threading.Thread(target=lambda: scores.append(grade(r"\boxed{2}", "2")))
    thread.start()
    thread.join()
    assert [score.value for score in scores] == [1.0]
    assert signal.getsignal(signal.SIGALRM) is before
