"""The generated problems: their sums are right, told in the question, and never on both sides of the split."""

from __future__ import annotations

import re

import pytest

from mcore_rl.data.arithmetic import LEVELS, Split, generate, split_of
from mcore_rl.ground.errors import ConfigError

GAINING, LOSING = ("buys", "finds", "gets", "wins"), ("gives", "loses", "sells")


def told(question: str) -> int:
    """The answer by reading the question, from left to right, as a person does."""
    story = question.split(". How many")[0]
    amount = None
    for word, number in re.findall(r"(has|boxes of|bags of|packs of|\w+)(?: away)? (\d+)", story):
        if word == "has":
            amount = int(number)
        elif word.endswith(" of"):
            amount *= int(number)
        else:
            assert word in GAINING + LOSING, question
            amount += int(number) if word in GAINING else -int(number)
    assert amount is not None
    return amount


@pytest.mark.parametrize("difficulty", LEVELS)
@pytest.mark.parametrize("split", Split)
def test_question_steps_and_answer_agree(difficulty: int, split: Split) -> None:
    problems = generate(difficulty, 400, 7, split)
    assert len({each.question for each in problems}) == 400
    for each in problems:
        *steps, last = each.solution.split("\n")
        assert last == f"#### {each.answer}"
        assert told(each.question) == int(each.answer) >= 0
        numbers = re.findall(r"\d+", each.question)
        before = None
        for step in steps:
            left, operator, right, _, result = step.split(" ")
            assert {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}[
                operator
            ] == int(result)
            assert before in (None, left)
            assert right in numbers
            before = result
        assert before == each.answer
        level = LEVELS[difficulty]
        assert len(steps) == level.changes + level.packs
        assert max(map(int, numbers)) <= level.largest and min(map(int, numbers)) >= 2


def test_difficulty_one_is_one_small_sum() -> None:
    steps = [each.solution.split("\n") for each in generate(1, 500, 0, Split.train)]
    assert {len(lines) for lines in steps} == {2}
    assert {lines[0].split(" ")[1] for lines in steps} == {"+", "-"}


def test_splits_never_meet_whatever_the_seeds() -> None:
    train = {each.question for seed in range(5) for each in generate(1, 2_000, seed, Split.train)}
    validation = {each.question for seed in range(5, 10) for each in generate(1, 500, seed, Split.validation)}
    assert not train & validation
    assert all(split_of(question) is Split.train for question in train)


def test_equal_arguments_give_equal_problems_on_every_machine() -> None:
    assert generate(2, 50, 3, Split.train) == generate(2, 50, 3, Split.train)
    assert generate(2, 50, 3, Split.train) != generate(2, 50, 4, Split.train)
    assert generate(1, 50, 3, Split.train)[:20] == generate(1, 20, 3, Split.train)
    first = generate(1, 1, 1, Split.train)[0]
    assert (first.question, first.solution) == (
        "Ruth has 6 books and sells 2. How many books does Ruth have?",
        "6 - 2 = 4\n#### 4",
    )


def test_what_cannot_be_generated_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"difficulty=9: there is no such difficulty\. Write one of 1, 2, 3, 4"):
        generate(9, 1, 0, Split.train)
    with pytest.raises(ConfigError, match="train=0: must be positive"):
        generate(1, 0, 0, Split.train)


def test_more_than_there_are_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcore_rl.data.arithmetic.TRIES", 0)  # leaves 10,000 draws, a tenth of them of validation
    with pytest.raises(ConfigError, match=r"validation=5000: difficulty 1 has about \d+ problems.*Write \d+ or less"):
        generate(1, 5_000, 0, Split.validation)
