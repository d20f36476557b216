"""Numbers as people write them in answers: ``1,234``, ``$5``, ``-3.50``; compared by value."""

from __future__ import annotations

import re
from collections import deque
from decimal import Decimal

# Possessive quantifiers do not backtrack, so no part of ``1.2.3`` matches, and time is linear.  A minus belongs to the
# number unless a digit or a letter precedes it, as in a subtraction.
NUMBER = (
    r"(?<![0-9])(?<![0-9][.,])(?<![0-9][eE])(?<![0-9][eE][-+])(?:(?<![0-9A-Za-z)])-\$?|\$-?)?"
    r"(?:[0-9][0-9,]*+(?:\.[0-9]++)?+|\.[0-9]++)(?![.,]?[0-9])"
)
# What follows a number and makes it another one, or one of several: 18e3, 18/7, 18-9, 18 99, 18 or 19, 18 million, 18k.
GOES_ON = (
    r"(?:[ \t]*+(?:\*\*|__?|`)?[ \t]*+"
    r"(?:(?:[-+*/^:\u00d7\u00f7x~]|\\[a-z]+|,?(?:or|and|to|by|over|times|minus|plus|point))[ \t]*+[({]*+)?"
    r"[ \t]*+[-+$]*+\.?[0-9]"
    r"|[eE][-+]?[0-9]|[kKMB](?![A-Za-z])|[ \t]*+\\?(?:frac|times|cdot|div)(?![a-z])"
    r"|[ \t]*+(?:dozen|hundred|thousand|million|billion|trillion)(?![a-z]))"
)
_NUMBER = re.compile(NUMBER)
_GOES_ON = re.compile(GOES_ON)
_WHOLE = re.compile(rf"\s*+(?P<marks>\*\*|__|[*_`]|)({NUMBER})\s*+[.%]?+(?P=marks)[.%]?+\s*+")


def number_value(written: str) -> Decimal:
    """The value of text that matches ``NUMBER``, without its dollar sign and commas."""
    return Decimal(written.replace("$", "").replace(",", ""))


def plain(value: Decimal) -> str:
    """The one exact spelling of a value: ``1000`` for 1,000.0 and 1e3, ``0`` for -0."""
    text = f"{value:f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text


def as_number(text: str) -> Decimal | None:
    """The value of ``text`` if it is one number, perhaps with a period, a percent sign or Markdown's marks."""
    match = _WHOLE.fullmatch(text)
    return None if match is None else number_value(match[2])


def last_number(text: str) -> Decimal | None:
    """The last number in ``text``; None if there is none or if it goes on, as ``18 million``.

    In ``16-3`` it is 3, in ``= -3`` it is -3.
    """
    last = deque(_NUMBER.finditer(text), maxlen=1)
    return None if not last or _GOES_ON.match(text, last[0].end()) else number_value(last[0][0])
