r"""Units behind a quantity: ``12 \text{ cm}``, ``90^\circ``, ``18 dollars``.

A unit is left out freely, since the question mostly names it; another unit is another answer.  Words that are no unit
of the table count as none: 9 apples are 9.  Words that change the number, as ``million``, are never taken for a unit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Unit:
    """A unit: ``factor`` of the base of its dimension, which is to ``power``.

    dimension: empty for a word that is no unit of the table.
    """

    dimension: str
    factor: Fraction
    power: int = 1


def _family(dimension: str, **factors: str) -> dict[str, tuple[str, Fraction]]:
    return {
        name.replace("_", " "): (dimension, Fraction(factor))
        for names, factor in factors.items()
        for name in names.split("__")
    }


UNITS: dict[str, tuple[str, Fraction]] = {
    **_family(
        "length",
        mm__millimeter__millimetre="1/1000",
        cm__centimeter__centimetre="1/100",
        dm="1/10",
        m__meter__metre="1",
    ),
    **_family("length", km__kilometer__kilometre="1000", in__inch__inche="127/5000", ft__foot__feet="381/1250"),
    **_family("length", yd__yard="1143/1250", mi__mile="1609344/1000"),
    **_family(
        "mass", mg__milligram="1/1000000", g__gram="1/1000", kg__kilogram="1", lb__lbs__pound="45359237/100000000"
    ),
    **_family("mass", oz__ounce="45359237/1600000000"),
    **_family(
        "time", ms="1/1000", s__sec__second="1", min__minute="60", h__hr__hour="3600", day="86400", week="604800"
    ),
    **_family("volume", ml__mL__milliliter="1/1000", l__L__liter__litre="1"),
    **_family("money", dollar="1", cent="1/100"),
    **_family("angle", degree__deg="1"),
    **_family("radian", radian__rad="1"),
    **_family("mph", mph__miles_per_hour="1"),
    **_family("km/h", kmh__kmph="1"),
    **_family("forenoon", am__a_m="1"),
    **_family("afternoon", pm__p_m="1"),
    **_family("month", month="1", year="12"),
}
# These change the number or say that there are several.
_NO_UNIT = re.compile(
    r"\b(?:or|and|to|more|less|least|most|than|times|factorial|squared|cubed|half|halves|thirds?|quarters?|not|minus|plus"
    r"|point|dozen|hundred|thousand|million|billion|trillion|mod|modulo|over|divided|solution|if|when|for|where|is|are)\b"
)
_NOUN = r"\\text\{\s*([A-Za-z][A-Za-z .~-]*?)\s*\.?\s*\}"
_TEXT_UNIT = re.compile(rf"(.*[\w}})\]])\s*{_NOUN}\s*(?:\^\s*\{{?\s*([23])\s*\}}?)?", re.DOTALL)
_BARE_UNIT = re.compile(
    r"(.*(?:\d|\\frac\{[^{}]*\}\{[^{}]*\}|\\pi|\}))\s*(?<![A-Za-z\\])"
    r"(cm|mm|km|kg|mg|lb|ft|hr|am|pm|a\.m|p\.m|[A-Za-z]{3,}(?: [a-z]+){0,2})\s*(?:\^\s*\{?\s*([23])\s*\}?)?",
    re.DOTALL,
)
_DEGREES = re.compile(r"([^,]*[\d}])\s*\^\\circ")
_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc|arc)")


def split_unit(text: str) -> tuple[str, Unit | None]:
    """(the quantity, its unit); (``text``, None) where no unit follows one."""
    if (match := _DEGREES.fullmatch(text)) and not _FUNCTION.search(text):
        return match[1], Unit("angle", Fraction(1))
    if match := _TEXT_UNIT.fullmatch(text):
        return _with_unit(text, match[1], match[2], match[3])
    if match := _BARE_UNIT.fullmatch(text):
        return _with_unit(text, match[1], match[2], match[3])
    return text, None


def _with_unit(text: str, quantity: str, word: str, power: str | None) -> tuple[str, Unit | None]:
    if _NO_UNIT.search(word.lower()) or not re.search(r"\d|\\pi|\\sqrt", quantity):
        return text, None
    name = re.sub(r"[.~]", " ", word).strip()
    squares = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
    first, _, rest = name.partition(" ")
    exponent = int(power or 1)
    if first.lower() in squares and rest:
        exponent = squares[first.lower()]
        name = rest
    known = UNITS.get(name) or UNITS.get(name.lower()) or UNITS.get(name.lower().removesuffix("s"))
    if known is None:
        return quantity, Unit("", Fraction(1), exponent)
    return quantity, Unit(known[0], known[1], exponent)


def letter_unit(text: str) -> tuple[str, Unit | None]:
    """(the quantity, its unit) of ``12 m``: a bare letter is a unit only where the ground truth has one."""
    match = re.fullmatch(r"(.*[\d}])\s*(m|g|s|h|l|L)\s*(?:\^\s*\{?\s*([23])\s*\}?)?", text, re.DOTALL)
    return (text, None) if match is None else _with_unit(text, match[1], match[2], match[3])
