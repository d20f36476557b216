"""Units: what is one, what is left of the quantity, and which words are none."""

from __future__ import annotations

from fractions import Fraction

import pytest

from mcore_rl.rewards.math_units import Unit, letter_unit, split_unit

CM, NONE = Unit("length", Fraction(1, 100)), Unit("", Fraction(1))


@pytest.mark.parametrize(
    ("text", "quantity", "unit"),
    [
        (r"12 \text{ cm}", "12", CM),
        (r"12\text{cm}^2", "12", Unit("length", Fraction(1, 100), 2)),
        (r"12 \text{ square cm}", "12", Unit("length", Fraction(1, 100), 2)),
        ("12 cm", "12", CM),
        (r"36\sqrt{7}cm^{3}", r"36\sqrt{7}", Unit("length", Fraction(1, 100), 3)),
        (r"\frac{270}{7}\text{ degrees}", r"\frac{270}{7}", Unit("angle", Fraction(1))),
        (r"90^\circ", "90", Unit("angle", Fraction(1))),
        ("9 apples", "9", NONE),
        (r"1920\text{ ways.}", "1920", NONE),
        ("5am", "5", Unit("forenoon", Fraction(1))),
        (r"1:58 \text{ p.m.}", "1:58", Unit("afternoon", Fraction(1))),
    ],
)
def test_a_quantity_and_its_unit(text: str, quantity: str, unit: Unit) -> None:
    assert split_unit(text) == (quantity, unit)


@pytest.mark.parametrize(
    "text",
    [
        *("12", "12 m", "6 t", "x^2", r"\text{cm}", "apples", r"5 \text{ or more}", r"3 \text{ dozen}", "18 thousand"),
        *(r"5 \text{ and } 6", r"\sin 30^\circ", r"x \text{ if } x > 2", r"12 \text{ squared}", r"4 \text{ times}"),
    ],
)
def test_what_is_no_unit(text: str) -> None:
    assert split_unit(text) == (text, None)


def test_a_letter_is_a_unit_only_where_it_is_looked_for() -> None:
    assert letter_unit("12 m") == ("12", Unit("length", Fraction(1)))
    assert letter_unit("12 x") == ("12 x", None)
