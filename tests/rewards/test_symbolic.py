"""Algebra: LaTeX is read as a whole or not at all, and equal is equal."""

from __future__ import annotations

import math
from fractions import Fraction
from random import Random

import pytest

from mcore_rl.rewards.symbolic import close, equal, last_statement, reads


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("x^2-1", "(x-1)(x+1)"), (r"\sqrt{8}", r"2\sqrt{2}"), (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}"),
        ("y=2x+1", "2y-4x=2"), (r"\frac{x^2}{4}+\frac{y^2}{3}=1", "3x^2+4y^2=12"), (r"\pi", "3.141593"),
        (r"\frac{1}{3}", "0.333333"),
        (r"\binom{5}{2}", "10"), ("5!", "120"), (r"\log_{2} 8", "3"), (r"\sin 30^\circ", "0.5"), ("e^{2x}", "(e^x)^2"),
        (r"\sqrt{x}\sqrt{y}", r"\sqrt{xy}"), ("0.1+0.2", "0.3"), ("2^{100}", "4^{50}"), (r"\emptyset", r"\emptyset"),
    ],
)  # fmt: skip
def test_equal(gold: str, answer: str) -> None:
    assert equal(gold, answer)


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("x^2-1", "(x-1)(x+2)"), ("x^2+1=0", "x^2+2=0"), ("[1,-2]", r"\emptyset"), ("x", "|x|"), ("1.24e-8", "1.23e-8"),
        (r"\pi", "3.14"), (r"\pi", "3.14159"), ("6 t", "6"), ("5", "4=5"), ("5", "5=5"), (r"\frac{1}{0}",
        r"\frac{2}{0}"),
        (r"\infty-\infty", "0"), ("2^{100}", "2^{100}+1"), (r"\lfloor\frac{2n-1}{5}\rfloor",
        r"\lfloor\frac{2n-1}{6}\rfloor"),
        ("20=3464.1", "20=3464.2"), ("x=1=2", "x=2=2"), ("x=3", "y=3"), ("a b", "a c"), ("", ""), ("x^2", ""),
        (r"\frac{1}{4}\vec{a}", r"\frac{1}{4}\vec{b}"),
    ],
)  # fmt: skip
def test_not_equal(gold: str, answer: str) -> None:
    assert not equal(gold, answer)


def drawn_number(random: Random) -> tuple[str, Fraction]:
    """(LaTeX, its value by Python's own integers) of a number that floats do not tell from its neighbours."""
    n = random.randint(30, 300)
    k = random.randint(2, 9)
    return random.choice(
        [
            (f"{k}^{{{n}}}", Fraction(k**n)),
            (f"{n}!", Fraction(math.factorial(n))),
            (f"\\binom{{{2 * n}}}{{{n}}}", Fraction(math.comb(2 * n, n))),
            (f"\\frac{{1}}{{{n}!}}", Fraction(1, math.factorial(n))),
            (f"\\frac{{{k}^{{{n}}}}}{{{k + 1}^{{{n}}}}}", Fraction(k**n, (k + 1) ** n)),
            (f"{k}^{{-{n}}}", Fraction(1, k**n)),
        ]
    )


@pytest.mark.parametrize("seed", range(12))
def test_exact_numbers_are_compared_exactly(seed: int) -> None:
    """Python's fractions say whether two numbers are equal; so does the grader, also with a root, pi or a letter."""
    random = Random(seed)
    first, value = drawn_number(random)
    second, other = drawn_number(random)
    written = [
        (first, value),
        (f"{first} - 1", value - 1),
        (f"2 \\cdot {first} - {first}", value),
        (f"{first} + {second}", value + other),
        (f"\\frac{{2}}{{3}} \\cdot {first}", value * Fraction(2, 3)),
    ]
    for gold, of_gold in written:
        for answer, of_answer in written:
            same = of_gold == of_answer
            assert equal(gold, answer) is same, (gold, answer)
            assert equal(f"({gold}) \\pi", f"\\pi ({answer})") is same, (gold, answer)
            assert equal(f"({gold}) n", f"n ({answer})") is same, (gold, answer)


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("2^{2019}-1", "2^{2019}"),
        ("100!", "100!+1"),
        (r"\frac{1}{50!}", r"\frac{1}{51!}"),
        (r"\frac{1}{50!}", "0"),
        (r"n \cdot 2^{100} - 1", r"n \cdot 2^{100}"),
        (r"\pi", r"\pi + 10^{-1000}"),
        (r"\sqrt{100!}", r"\sqrt{100!+1}"),
        (r"\log(2^{2019}-1)", r"\log(2^{2019})"),
        ("x^{100}", "x^{100} + 10^{-60}"),
        ("|x-100|", "100-x"),
        (r"\begin{pmatrix}2^{99}\end{pmatrix}", r"\begin{pmatrix}2^{99}+1\end{pmatrix}"),
        ("2^{2019}-1", "2.0^{2019}"),  # a decimal is no way to a whole number of 608 digits
        ("2^{2019}", "2^{2019}+0.5"),
    ],
)
def test_nearly_equal_is_not_equal(gold: str, answer: str) -> None:
    assert not equal(gold, answer)
    assert not equal(answer, gold)


@pytest.mark.parametrize("latex", ["x^2", r"\frac{x}{2}", "y=2x", r"\sum_{n=0}^{\infty} x^n", "a_1", r"\theta"])
def test_what_is_read(latex: str) -> None:
    assert reads(latex)


@pytest.mark.parametrize(
    "latex",
    [
        "",
        "x^2 +",
        "(1-x",
        r"\{x|-2\leq x<1\}",
        "3 apples",
        r"\text{even}+1",
        "the slope is 2",
        "1 for y",
        "1, 2 \\foo",
        "平行",
    ],
)
def test_what_is_not_read_as_a_whole(latex: str) -> None:
    assert not reads(latex)


def test_a_decimal_is_as_good_as_six_places() -> None:
    assert close(1 / 3, 0.333333) and close(1 / 12, 0.083333) and close(2 / 3, 0.666667)
    assert not close(1 / 3, 0.33333) and not close(2 / 3, 0.666666 - 1e-6) and not close(1.24e-8, 1.23e-8)


@pytest.mark.parametrize(
    ("response", "said"),
    [
        ("The answer is 204.", "204"),
        (r"so $x^2$ and finally $\frac{1}{2}$", r"\frac{1}{2}"),
        ("no idea", None),
        ("", None),
    ],
)
def test_the_last_statement(response: str, said: str | None) -> None:
    assert last_statement(response) == said
