"""Numbers as people write them in answers: ``1,234``, ``$5``, ``-3.50``; compared by value."""

from __future__ import annotations

import re
from decimal import Decimal

# Possessive: digits that were taken are not given back, so that no part of ``1.2.3`` counts, and time is linear.  A
# minus belongs to the number only where it does not subtract it from what stands before.
NUMBER = (
    r"(?<![0-9])(?<![0-9][.,])(?:(?<![0-9A-Za-z)])-\$?|\$-?)?"
    r"(?:[0-9][0-9,]*+(?:\.[0-9]++)?+|\.[0-9]++)(?![.,]?[0-9])"
)
_NUMBER = re.compile(NUMBER)
_WHOLE = re.compile(rf"\s*+({NUMBER})\s*+[.%]?+\s*+")


def number_value(written: str) -> Decimal:
    """The value of text that matches ``NUMBER``: no dollar, no commas."""
    return Decimal(written.replace("$", "").replace(",", ""))


def plain(value: Decimal) -> str:
    """One spelling for one value, exact: ``1,000.0`` and ``1e3`` are ``1000``, ``-0`` is ``0``."""
    text = f"{value:f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text


def as_number(text: str) -> Decimal | None:
    """The value of ``text`` if it is one number and nothing else but space, a period or a percent sign; else None."""
    found = _WHOLE.fullmatch(text)
    return None if found is None else number_value(found[1])


def last_number(text: str) -> Decimal | None:
    """The last number in ``text``, None where there is none.  ``16-3`` ends in 3, ``= -3`` in -3."""
    found = _NUMBER.findall(text)
    return number_value(found[-1]) if found else None
