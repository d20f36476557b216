"""What becomes of a key of verl's: a ``KeyRow``, and the conversions of single values.

A row is one of four kinds.  ``to``: a key of ours takes the value.  ``part``: it is decided together with others, by a
rule of ``rules.py``.  ``gone``: nothing has to be written here.  ``absent``: what it asks for is not here; a value that
asks for nothing may be left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

Convert = Callable[[Any], Any]


class NotHereError(Exception):
    """What a value asks for is not here.  args: why."""


def same(value: Any) -> Any:
    """The value as it is."""
    return value


@dataclass(frozen=True)
class KeyRow:
    """verl: a dotted key; ``{a,b}`` are alternatives, a last ``*`` is all below, another one name.

    ours: the keys that take its value.
    note: what is different; of a key that is gone or absent, why.
    convert: verl's value to ours; of several keys together, ``same``.
    rule: the rule that decides ours from several of verl's keys.
    absent: whether what it asks for is not here.
    keeps: a default of ours stays whatever verl's is.
    differs: the same run does something else here than in verl; false: ``note`` is about names and values alone.
    needed: a run cannot do without it, and verl's default is nobody's: it stays empty unless it was written.
    """

    verl: str
    ours: tuple[str, ...] = ()
    note: str = ""
    convert: Convert = same
    rule: str = ""
    absent: bool = False
    keeps: bool = False
    differs: bool = False
    needed: bool = False

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Matches the keys that the row is about."""
        text = re.escape(self.verl).replace(r"\{", "(?:").replace(r"\}", ")").replace(",", "|")
        text = re.sub(r"\\\.\\\*$", lambda _: r"\..+", text)
        return re.compile(text.replace(r"\*", r"[^.]*"))

    @property
    def names(self) -> list[str]:
        """The keys that it is about, alternatives written out."""
        return alternatives(self.verl)

    def matches(self, key: str) -> bool:
        """Whether it is about ``key``."""
        return self.pattern.fullmatch(key) is not None


def alternatives(text: str) -> list[str]:
    """``a.{b,c}`` as ``a.b`` and ``a.c``."""
    before, opened, rest = text.partition("{")
    if not opened:
        return [text]
    inside, _, after = rest.partition("}")
    return [name for each in inside.split(",") for name in alternatives(f"{before}{each}{after}")]


def within(group: str, names: str) -> list[str]:
    """The keys of a group.  names: with spaces between."""
    return [f"{group}.{name}" for name in names.split()]


def to(
    verl: str,
    ours: str,
    convert: Convert = same,
    note: str = "",
    *,
    keeps: bool = False,
    differs: bool = False,
    needed: bool = False,
) -> KeyRow:
    """A key whose value one key of ours takes."""
    return KeyRow(verl, (ours,), note, convert, keeps=keeps, differs=differs, needed=needed)


def part(verl: str, ours: str, rule: str, note: str = "", *, differs: bool = False) -> KeyRow:
    """A key that is decided together with others.  ours: the keys that the rule may write, with spaces between."""
    return KeyRow(verl, tuple(ours.split()), note, rule=rule, differs=differs)


def gone(verl: str, why: str) -> KeyRow:
    """A key that needs nothing here."""
    return KeyRow(verl, note=why)


def absent(verl: str, why: str) -> KeyRow:
    """A key that asks for what is not here, unless its value is verl's default or asks for nothing."""
    return KeyRow(verl, note=why, absent=True)


def listed(value: Any) -> Any:
    """One item as a list."""
    return value if isinstance(value, list) or value is None else [value]


def or_never(value: Any) -> Any:
    """A frequency: -1 is 0 here."""
    if not isinstance(value, int | float | None) and not str(value).lstrip("-").isdigit():
        raise NotHereError("write a number of steps; an epoch has rows / data.train_batch_size")
    return 0 if value is None else max(0, int(value))


def or_all(value: Any) -> Any:
    """A number of samples: -1 is null here."""
    return None if value is None or int(value) < 0 else value


def of_names(names: Mapping[str, str | None], why: str) -> Convert:
    """A conversion of names.  ``names``: verl's to ours.  why: of any other name."""

    def convert(value: Any) -> Any:
        if str(value) not in names:
            raise NotHereError(why)
        return names[str(value)]

    return convert
