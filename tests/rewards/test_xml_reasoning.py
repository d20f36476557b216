"""XML reasoning: each part by hand."""

from __future__ import annotations

import pytest

from mcore_rl.config.reward import RewardConfig, XmlConfig
from mcore_rl.rewards.score import RewardRequest
from mcore_rl.rewards.xml_reasoning import grade_xml, tag_count, xml_answer

# Weights whose sums are all different.
CONFIG = RewardConfig(
    xml=XmlConfig(correctness=16.0, integer=8.0, strict_format=4.0, soft_format=2.0, tag_count=1.0)
)  # fmt: skip
PERFECT = "<reasoning>\n1 + 1\nis 2\n</reasoning>\n<answer>\n2\n</answer>\n"


def value(response: str, ground_truth: object = "2") -> float:
    score = grade_xml(RewardRequest(("p", 0), "xml", response, ground_truth), CONFIG)
    assert score.value == sum(score.parts.values())
    assert score.correct == float(score.parts["correctness"] > 0)
    return score.value


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (PERFECT, 16 + 8 + 4 + 2 + 1),
        (PERFECT.rstrip(), 16 + 8 + 4 + 2 + 1),  # an end of the last line is not asked for
        (PERFECT.replace("\n2\n", "\n3\n"), 8 + 4 + 2 + 1),
        (PERFECT.replace("\n2\n", "\ntwo\n"), 4 + 2 + 1),
        (PERFECT.replace("\n2\n", "\n2.0\n"), 16 + 4 + 2 + 1),
        (PERFECT.replace("\n2\n", "\n-2\n"), 8 + 4 + 2 + 1),
        ("<reasoning>r</reasoning><answer>2</answer>", 16 + 8 + 2 + 1),
        ("hm <reasoning>r</reasoning> <answer>2</answer>", 16 + 8 + 2 + 1),
        ("<answer>2</answer><reasoning>r</reasoning>", 16 + 8 + 1 - 0.001 * len("<reasoning>r</reasoning>")),
        ("<answer>2</answer>", 16 + 8 + 0.5),
        ("<answer>2", 0.25),
        ("2</answer>", 0.25),
        (PERFECT + "bye", 16 + 8 + 2 + 1 - 0.003),
        ("well\n" + PERFECT, 16 + 8 + 2 + 1),
        (PERFECT + PERFECT, 16 + 8 + 2 + 0),
        ("2", 0),
        ("", 0),
    ],
)
def test_the_sum_of_the_parts(response: str, expected: float) -> None:
    assert value(response) == pytest.approx(expected, abs=1e-12)


def test_text_answers_are_compared_as_text() -> None:
    assert value("<answer> Paris </answer>", "Paris") == 16.5
    assert value("<answer>paris</answer>", "Paris") == 0.5
    assert value("<answer></answer>", "") == 0.5  # nothing is no answer


def test_a_whole_solution_as_ground_truth() -> None:
    assert value("<answer>1,200</answer>", "so\n#### 1200") == 16.5


def test_text_after_the_end_costs() -> None:
    assert tag_count(PERFECT) == 1.0
    assert tag_count(PERFECT + "x" * 100) == pytest.approx(0.9)
    assert tag_count(PERFECT + "x" * 5000) == 0.0


def test_the_last_answer_counts() -> None:
    assert xml_answer("<answer>1</answer><answer>\n 2 \n</answer> x </answer>") == "2"
    assert xml_answer("<answer>1</answer><answer>2") == ""


def test_hostile_text_takes_linear_time() -> None:
    for response in ("<reasoning>" * 50_000, "<reasoning></reasoning><answer>" * 20_000, "<answer>\n" * 50_000):
        value(response)  # quadratic takes minutes: the limit of a test is the check


@pytest.mark.parametrize(("inside", "answer"), [("2.0", "2"), (" two apples ", "two apples"), ("", None), ("  ", None)])
def test_the_answer_is_what_is_compared(inside: str, answer: str | None) -> None:
    request = RewardRequest(("p", 0), "xml", f"<answer>{inside}</answer>", "2")
    assert grade_xml(request, CONFIG).answer == answer
