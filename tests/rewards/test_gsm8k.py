"""GSM8K: hand-made cases, and every gold solution of the real data, as it is and with its number changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mcore_rl.config.reward import AnswerMethod, Gsm8kConfig, RewardConfig
from mcore_rl.rewards.gsm8k import grade_gsm8k
from mcore_rl.rewards.score import RewardRequest, Score
from tests.support.skips import NOT_INSTALLED

DATA = Path(__file__).parents[3] / "shared/data/gsm8k"
STRICT = RewardConfig(gsm8k=Gsm8kConfig(score=1.0, format_score=0.1))
FLEXIBLE = RewardConfig(gsm8k=Gsm8kConfig(method=AnswerMethod.flexible, score=1.0, format_score=0.1))


def grade(response: str, ground_truth: object = "1234", config: RewardConfig = STRICT) -> Score:
    return grade_gsm8k(RewardRequest(("p", 0), "openai/gsm8k", response, ground_truth), config)


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("a\n#### 1234", 1.0),
        ("#### 1,234", 1.0),
        ("####1234.", 1.0),
        ("#### $1,234.00", 1.0),
        ("#### 1234 dollars", 1.0),
        ("#### 5\n#### 1234", 1.0),  # the last one is the answer
        ("#### 1234\n#### 5", 0.1),
        ("#### -1234", 0.1),
        ("#### 1234.5", 0.1),
        ("#### 12345", 0.1),
        ("#### 1234.1.2", 0.0),  # no number
        ("#### x\nthe answer is 1234", 0.0),
        ("####\n1234", 1.0),  # on the next line
        ("#### +1234", 1.0),
        ("#### **1234**", 1.0),
        *(("#### *1234*", 1.0), ("#### __1234__", 1.0), ("#### `1234`", 1.0), ("#### `1234` 99999", 0.0)),
        ("####\n**1234** dollars", 1.0),
        ("#### 1234\n99999", 1.0),
        ("#### 1234. 7 are left", 1.0),
        ("#### 1234 (617*2)", 1.0),
        ("#### 1234 99999", 0.0),  # the number goes on
        ("#### 1234/7", 0.0),
        ("#### 1234 / 7", 0.0),
        ("#### 1234e3", 0.0),
        ("#### 1234-99999", 0.0),
        ("#### 1234 million", 0.0),
        ("#### 1234 or 99", 0.0),
        ("#### 1234k", 0.0),
        ("#### 1234^2", 0.0),
        (r"#### 1234\frac{1}{2}", 0.0),
        ("#### 1234 * (2 + 3)", 0.0),
        ("#### **1234** 99999", 0.0),
        ("####\n\n1234", 0.0),  # not on the next line
        ("### 1234", 0.0),
        ("1234", 0.0),
        ("", 0.0),
    ],
)
def test_strict(response: str, value: float) -> None:
    score = grade(response)
    assert score.value == value
    assert score.correct == float(value == 1.0)
    assert score.parts == {"format": float(value > 0)}


@pytest.mark.parametrize(
    ("response", "value"),
    [
        *(("it is 1,234.", 1.0), ("#### 1234", 1.0), ("1234 is not 7", 0.1), ("no number", 0.0)),
        *(("it is 1234 million", 0.0), ("it is 1234e3", 0.0), ("it is 1234k", 0.0), ("it is 5e1234", 0.0)),
    ],
)
def test_flexible(response: str, value: float) -> None:
    assert grade(response, config=FLEXIBLE).value == value


@pytest.mark.parametrize("ground_truth", ["18", 18, 18.0, "18.0", " 18 ", "16 + 2 = 18\n#### 18"])
def test_forms_of_the_ground_truth(ground_truth: object) -> None:
    assert grade("#### 18", ground_truth).value == 1.0
    assert grade("#### 19", ground_truth).value == 0.1


@pytest.mark.parametrize("ground_truth", ["", None, "many", "1 2"])
def test_a_ground_truth_without_a_number_is_named(ground_truth: object) -> None:
    with pytest.raises(ValueError, match=r"is not a number\. Correct reward_model.ground_truth"):
        grade("#### 18", ground_truth)


def gold_solutions() -> list[str]:
    if not DATA.is_dir():
        pytest.skip(f"{NOT_INSTALLED}the GSM8K files in {DATA}")
    lines = [line for part in ("train", "test") for line in (DATA / f"{part}.jsonl").read_text().splitlines()]
    return [json.loads(line)["answer"] for line in lines]


def changed(answer: str) -> list[str]:
    """``answer`` with another number: one more, its negative or a digit more or less; its thousands separators kept."""
    head, _, number = answer.rpartition("####")
    value = int(number.replace(",", ""))
    others = {value + 1, value - 1, -value if value else 7, value * 10 + 5, 10 * value if value else 3}
    return [f"{head}#### {other:,}" for other in others]


def test_every_gold_solution_scores_1_and_none_does_with_another_number() -> None:
    solutions = gold_solutions()
    assert len(solutions) == 8792
    plain = [answer.rpartition("#### ")[2].replace(",", "") for answer in solutions]  # as prepared data holds it
    scores = [grade(answer, number) for answer, number in zip(solutions, plain, strict=True)]
    assert {(score.value, score.correct) for score in scores} == {(1.0, 1.0)}
    wrong = [grade(other, number) for answer, number in zip(solutions, plain, strict=True) for other in changed(answer)]
    assert len(wrong) == 5 * 8792
    assert {(score.value, score.correct) for score in wrong} == {(0.1, 0.0)}
    goes_on = (" 99999", "/7", "e3", "-99999", " million", " or 7", "k", " * 3")
    for row, (answer, number) in enumerate(zip(solutions, plain, strict=True)):
        assert grade(answer + goes_on[row % len(goes_on)], number).value == 0.0
        assert grade(answer.replace("#### ", ("####\n", "#### +", "#### **")[row % 3]), number).value == 1.0
    flexible = [grade(answer, number, FLEXIBLE).value for answer, number in zip(solutions, plain, strict=True)]
    assert set(flexible) == {1.0}


@pytest.mark.parametrize(
    ("response", "answer", "flexible"),
    [("so 3\n#### 1,234.00", "1234", "1234"), ("#### 5 of 7", "5", "7"), ("12", None, "12"), ("none", None, None)],
)
def test_the_answer_is_the_number_that_is_compared(response: str, answer: str | None, flexible: str | None) -> None:
    assert grade(response).answer == answer
    assert grade(response, config=FLEXIBLE).answer == flexible
