"""What answers say: numbers are exact, brackets count, and what is left is for sympy."""

from __future__ import annotations

from fractions import Fraction

import pytest

from mcore_rl.rewards.math_forms import (
    Based,
    Expression,
    Form,
    Items,
    LetterChoice,
    Matrix,
    Measure,
    Named,
    Number,
    Relation,
    Words,
    plain_number,
    read,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42), ("-42.", -42), ("+42", 42), ("1,000", 1000), (r"1\,000", 1000),
        ("1,000,000.50", Fraction("1000000.5")),
        (".5", Fraction(1, 2)), ("007", 7), (r"\frac12", Fraction(1, 2)), (r"-\frac{3}{4}", Fraction(-3, 4)),
        (r"\frac{-3}{4}", Fraction(-3, 4)), ("3/4", Fraction(3, 4)), ("3 1/2", Fraction(7, 2)),
        (r"3\frac{1}{2}", Fraction(7, 2)),
        (r"-3\frac12", Fraction(-7, 2)), (r"1.24 \times 10^{-8}", Fraction("1.24e-8")),
        ("1.24e-8", Fraction("1.24e-8")),
        (r"10^{6}", 10**6), (r"2 \cdot 10^3", 2000), (r"75\%", Fraction(3, 4)), ("75%", Fraction(3, 4)),
        (r"0.\overline{3}", Fraction(1, 3)), (r"1.2\overline{34}", Fraction(611, 495)), ("(5)", 5), ("**18**", 18),
        ("18 million", 18_000_000), (r"\$5.50", Fraction("5.5")), (r"\text{42}", 42),
    ],
)  # fmt: skip
def test_numbers(text: str, value: Fraction | int) -> None:
    form = read(text)
    assert isinstance(form, Number), form
    assert form.value == value


@pytest.mark.parametrize(
    "text", ["", "--5", "1.2.3", "5/0", r"\frac{1}{0}", "1e999", "5!", "2^{3}", "nan", "inf", "0x10", "١٨", "1,00"]
)
def test_what_is_no_number(text: str) -> None:
    assert not isinstance(read(text), Number)
    assert plain_number(text) is None


def test_the_cheap_path_reads_as_the_long_one() -> None:
    for text in ("42", "-42", "+7", "1,234,567", "3.50", "0.0", "-0", "12.", "$5", "18;"):
        plain = plain_number(text)
        assert plain is not None
        longer = read(f"{text} ".replace("$", "\\$").replace(";", " ; "))
        assert isinstance(longer, Number) and (longer.value, longer.is_decimal) == (plain.value, plain.is_decimal), text


@pytest.mark.parametrize(
    ("text", "kind", "brackets"),
    [
        ("(1, 2)", Items, "()"), ("[1, 2)", Items, "[)"), (r"\{1, 2\}", Items, "{}"), ("1, 2", Items, ""),
        (r"1 \text{ or } 2", Items, ""), ("5 and 6", Items, ""), (r"(-\infty, 1) \cup [2, \infty)", Items, "u"),
        (r"2 \pm \sqrt{3}", Items, ""), ("3:4", Items, ":"), (r"\mathbb{R}", Items, "()"), ("(1,2),(3,4)", Items, ""),
        (r"12 \text{ cm}", Measure, None), (r"2516_{8}", Based, None), (r"\text{Tuesday}", Words, None),
        (r"\textbf{(C)}\ 5", LetterChoice, None), (r"\text{(C)}", LetterChoice, None), ("C. x > 2", LetterChoice, None),
        (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", Matrix, None), ("x = 5", Named, None),
        ("f(x) = 2x", Named, None),
        (r"x \in [1, 2]", Named, None), (r"1 < x \leq 2", Relation, None), (r"\{x | x > 3\}", Relation, None),
        ("x < 1 or x > 3", Relation, None), ("(x+1)(x-1)", Expression, None), ("(A+B)^2", Expression, None),
        ("C", Expression, None),
        ("2x < 4", Expression, None), (r"\frac{x}{2}", Expression, None), ("6 t", Expression, None),
    ],
)  # fmt: skip
def test_kinds(text: str, kind: type[Form], brackets: str | None) -> None:
    form = read(text)
    assert type(form) is kind, form
    if isinstance(form, Items):
        assert form.brackets == brackets


def test_what_is_inside() -> None:
    choice = read(r"\textbf{(C)}\ 5")
    assert isinstance(choice, LetterChoice) and choice.letter == "C" and isinstance(choice.rest, Number)
    based = read("2516_8")
    assert isinstance(based, Based) and (based.digits, based.base) == ("2516", 8)
    relation = read(r"\{x \mid -2 \leq x < 1\}")
    assert isinstance(relation, Relation) and relation.in_set
    assert isinstance(relation.interval, Items) and relation.interval.brackets == "[)"
    assert read("3 > x") == read("3>x") != read("3 < x")


@pytest.mark.parametrize(
    "text", ["(" * 3000, "{" * 3000, "1," * 1500, "(" * 900 + "1" + ")" * 900, "x=" * 1500, "\\pm" * 1000]
)
def test_hostile_text_is_read_or_is_an_expression(text: str) -> None:
    try:
        assert isinstance(read(text), Form)
    except RecursionError:
        pytest.fail("too deep for a grader")
