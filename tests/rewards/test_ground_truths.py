"""Ground truths before a run: unusable ones are refused by row, those that are compared as text are counted."""

from __future__ import annotations

import logging

import pytest

from mcore_rl.ground.errors import DataError
from mcore_rl.rewards.ground_truths import check_ground_truths

READ = [
    r"\frac12",
    "204",
    204,
    r"so \boxed{x^2}",
    r"\{x|-2\leq x<1\}",
    r"\text{Tuesday}",
    "(1, 2)",
    r"12 \text{ cm}",
    "2516_8",
]
BY_TEXT = ["The slope 5 means that it rises by 5", r"\{x : x^2 +\}", r"a \oplus b", r"(1, x^2+)"]


def test_what_every_grader_reads_is_not_mentioned(caplog: pytest.LogCaptureFixture) -> None:
    rows = [(f"train/{row}", "math", truth) for row, truth in enumerate(READ)]
    check_ground_truths([*rows, ("train/9", "gsm8k", "18"), ("train/10", "unknown", None), ("train/11", "xml", "any")])
    assert caplog.text == ""


def test_those_that_are_compared_as_text_are_counted_with_their_rows(caplog: pytest.LogCaptureFixture) -> None:
    rows = [(f"train/{row}", "math", truth) for row, truth in enumerate([*READ, *BY_TEXT, *BY_TEXT])]
    with caplog.at_level(logging.WARNING):
        check_ground_truths(rows)
    assert "8 of 17 mathematical ground truths are compared as text" in caplog.text
    assert "train/9 'The slope 5 means" in caplog.text
    assert "and 3 more" in caplog.text


def test_those_that_no_answer_could_equal_are_refused_by_row(caplog: pytest.LogCaptureFixture) -> None:
    rows = [
        ("train/0", "gsm8k", "18"),
        ("train/1", "gsm8k", "many"),
        ("train/2", "math", " "),
        ("train/3", "math", r"\boxed{}"),
        ("train/4", "math", float("nan")),
        ("train/5", "math", "nan"),  # as pandas writes a missing value
    ]
    with pytest.raises(DataError) as caught:
        check_ground_truths(rows)
    said = str(caught.value)
    check_ground_truths(rows, refuse=False)
    assert said in caplog.text
    assert "train/1: ground truth 'many' is not a number" in said
    assert "train/2: ground truth ' ' is no formula" in said and "train/3" in said
    assert all(f"train/{row}: the ground truth is NaN" in said for row in (4, 5))
    assert "train/0" not in said
