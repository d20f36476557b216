"""Algebra: LaTeX is read as a whole or not at all, and equal is equal."""

from __future__ import annotations

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
