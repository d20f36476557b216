"""Numbers in text: which characters belong to them, and their value."""

from __future__ import annotations

import time
from decimal import Decimal

import pytest

from mcore_rl.rewards.numbers import as_number, last_number, plain


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("18", "18"),
        (" 1,234,567. ", "1234567"),
        ("$5", "5"),
        ("-$5.50", "-5.50"),
        ("$-5.50", "-5.50"),
        ("-3", "-3"),
        (".5", "0.5"),
        ("007", "7"),
        ("50%", "50"),
        *(("**5**", "5"), ("*5*.", "5"), ("`5`", "5"), ("__5.__", "5"), ("**5", None), ("*5_", None)),
        ("1.2.3", None),
        ("12 apples", None),
        ("3 4", None),
        ("--3", None),
        ("", None),
        ("$", None),
        ("١٨", None),  # digits of other scripts are not what the data sets hold
        ("9" * 6000, "9" * 6000),  # more digits than int() takes
    ],
)
def test_the_whole_text_is_a_number_or_not(text: str, value: str | None) -> None:
    assert as_number(text) == (None if value is None else Decimal(value))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("so 3 and then 12.", "12"),
        ("16-3", "3"),
        ("x-4", "4"),
        ("(1)-2", "2"),
        ("= -3", "-3"),
        ("it costs $1,200.50!", "1200.50"),
        ("first 4, then version 1.2.3", "4"),
        ("none", None),
    ],
)
def test_the_last_number(text: str, value: str | None) -> None:
    assert last_number(text) == (None if value is None else Decimal(value))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("1000.0", "1000"),
        ("1e3", "1000"),
        ("-3.50", "-3.5"),
        ("-0.0", "0"),
        ("100", "100"),
        ("0.10", "0.1"),
        ("0", "0"),
    ],
)
def test_one_spelling_for_one_value(value: str, text: str) -> None:
    assert plain(Decimal(value)) == text


def test_a_spelling_is_exact() -> None:
    assert plain(Decimal("9" * 60 + ".5")) == "9" * 60 + ".5"


@pytest.mark.parametrize("text", ["1" * 200_000 + ".", "1." * 100_000, ",1" * 100_000, "$-" * 100_000, "1-" * 100_000])
def test_hostile_text_takes_linear_time(text: str) -> None:
    started = time.process_time()
    last_number(text)
    as_number(text)
    assert time.process_time() - started < 5  # 0.05 s are needed; quadratic takes minutes
