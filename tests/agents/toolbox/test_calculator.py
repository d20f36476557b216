"""The calculator is exact, and calculates nothing but numbers."""

from __future__ import annotations

import random
from decimal import Decimal, getcontext

import pytest

from mcore_rl.agents.arithmetic import evaluated, written
from mcore_rl.agents.toolbox.calculator import SCHEMA, Calculator
from tests.support.awaited import awaited


def test_it_agrees_with_decimals_of_many_digits() -> None:
    getcontext().prec = 60
    rng = random.Random(1)
    for _ in range(300):
        left, right = (rng.choice([rng.randrange(10**9), round(rng.uniform(0.1, 999), 3)]) for _ in range(2))
        operator = rng.choice("+-*")
        expected = {"+": Decimal.__add__, "-": Decimal.__sub__, "*": Decimal.__mul__}[operator](
            Decimal(str(left)), Decimal(str(right))
        )
        assert evaluated(f"{left} {operator} {right}") == expected


@pytest.mark.parametrize(
    ("expression", "result"),
    [("1,234 * 2", "2468"), ("0.1 + 0.2", "0.3"), ("1/3", "0.333333333333"), ("-7 % 3", "2"), ("7 // 2", "3"),
     ("2^10", "1024"), ("+(2 - 5)", "-3"), ("2 ** -1", "0.5"), ("5.", "5")],
)  # fmt: skip
def test_what_people_write(expression: str, result: str) -> None:
    assert written(evaluated(expression)) == result


@pytest.mark.parametrize(
    ("expression", "problem"),
    [("1/0", "division by zero"), ("__import__('os')", "no arithmetic on numbers"), ("(1).real", "no arithmetic"),
     ("2 ** 99999999", "exponent"), ("99 ** 999", "too large"), ("1e999999999", "no number"), ("1 +", "no arithmetic"),
     ("1" * 600, "characters"), ("'a' * 9", "no number"), ("1 << 9", "operators are"), ("x", "no arithmetic"),
     ("(" * 240 + "1" + ")" * 240, "no arithmetic"), ("0x10", "no number"), ("10**1000 * 10**1000", "too large")],
)  # fmt: skip
def test_what_is_refused(expression: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        evaluated(expression)


@awaited
async def test_a_wrong_call_is_told_what_is_wrong() -> None:
    tool = Calculator({}, SCHEMA)
    right, wrong = [await tool.execute("e", {"expression": text}) for text in ("2 * 21", "2 *")]
    assert (right.text, right.failed) == ("42", False)
    assert wrong.failed and "is no arithmetic expression" in wrong.text
