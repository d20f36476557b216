r"""Rational numbers in all their ways of writing, exactly: ``1,000``, ``3\frac{1}{2}``, ``1.24 \times 10^{-8}``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from mcore_rl.rewards.latex_brackets import unwrapped

MAX_EXPONENT = 400  # of a power of ten that is still written out


@dataclass(frozen=True)
class Form:
    """What is common to all forms.  text: how it is written, without spaces."""

    text: str


@dataclass(frozen=True)
class Number(Form):
    """A rational number.  is_decimal: written with a point or a power of ten.  is_percent: written with a percent sign.

    ``value`` of 75% is 3/4.
    """

    value: Fraction
    is_decimal: bool = False
    is_percent: bool = False


def tight(text: str) -> str:
    """``text`` without spaces."""
    return re.sub(r"\s+", "", text)


_DIGITS = r"\d+(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+\.?\d*|\.\d+"
_SCALE = r"(?:\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*\{?\s*([-+]?\s*\d+)\s*\}?|[eE]\s*\{?([-+]?\d+)\}?)"
_DECIMAL = re.compile(rf"([-+]?)\s*({_DIGITS})({_SCALE})?\s*(%?)", re.ASCII)
_POWER_OF_TEN = re.compile(r"([-+]?)\s*10\s*\^\s*\{\s*([-+]?\d+)\s*\}", re.ASCII)
_RATIO = re.compile(
    rf"([-+]?)\s*(?:(\d+)\s*)?\\frac\{{\s*([-+]?\s*(?:{_DIGITS}))\s*\}}\{{\s*([-+]?\s*(?:{_DIGITS}))\s*\}}\s*(%?)",
    re.ASCII,
)
_SLASH = re.compile(rf"([-+]?)\s*(?:(\d+)\s+)?({_DIGITS})\s*/\s*({_DIGITS})\s*(%?)", re.ASCII)
_REPEATING = re.compile(r"([-+]?)\s*(\d*)\.(\d*)\\overline\{(\d+)\}", re.ASCII)
_PLAIN = re.compile(r"\s*\$?\s*(?:\\\$)?([-+]?)(\d{1,3}(?:,\d{3})+|\d+)(\.\d*)?\$?[.;]?\s*", re.ASCII)


def plain_number(text: str) -> Number | None:
    """The number that ``text`` is, if it is written with digits, commas and a point only: the cheap path."""
    match = _PLAIN.fullmatch(text)
    if match is None:
        return None
    sign, whole, decimals = match.groups()
    digits = f"{sign}{whole.replace(',', '')}"
    if decimals is None or not decimals.strip(".0"):
        return Number(digits, Fraction(int(digits)))
    return Number(digits + decimals, Fraction(digits + decimals), is_decimal=True)


def number(text: str) -> Number | None:
    """The rational number that ``text`` is, in any of its ways of writing; None if it is none."""
    written = unwrapped(text)
    if "," in written and "(" in text:
        return None  # a point, not thousands
    value: Fraction | None = None
    is_decimal, percent = False, ""
    if match := _DECIMAL.fullmatch(written):
        exponent = int((match[4] or match[5] or "0").replace(" ", ""))
        if abs(exponent) > MAX_EXPONENT:
            return None
        value = _signed(match[1], _digits(match[2]) * Fraction(10) ** exponent)
        is_decimal, percent = value.denominator != 1 or exponent < 0, match[6]
    elif match := _POWER_OF_TEN.fullmatch(written):
        if abs(int(match[2])) > MAX_EXPONENT:
            return None
        value = _signed(match[1], Fraction(10) ** int(match[2]))
    elif (match := _RATIO.fullmatch(written)) or (match := _SLASH.fullmatch(written)):
        top, bottom = _digits(match[3]), _digits(match[4])
        if not bottom or (match[2] and not (top > 0 and bottom > 0)):
            return None
        value, percent = _signed(match[1], int(match[2] or 0) + top / bottom), match[5]
    elif match := _REPEATING.fullmatch(written):
        fixed, period = match[3], match[4]
        repeated = Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(fixed))
        value = _signed(match[1], Fraction(f"{match[2] or 0}.{fixed or 0}") + repeated)
    if value is None:
        return None
    return Number(tight(text), value / 100 if percent else value, is_decimal, bool(percent))


def _digits(text: str) -> Fraction:
    return Fraction(text.replace(",", "").replace(" ", "").rstrip("."))


def _signed(sign: str, value: Fraction) -> Fraction:
    return -value if sign == "-" else value
