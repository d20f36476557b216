"""Names of keys: the nearest known ones for one that does not exist, and the fields that have them.

A key is what a user writes.  Its field has the same name, but where Python reserves the word: the group ``async`` is
the field ``async_``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

NO_KEY = "there is no such key"  # the problem of a violation
RESERVED = ("async",)  # groups whose names are words of Python's


def meant(name: str, known: Iterable[str], otherwise: str) -> str:
    """The remedy for an unknown name: "Did you mean ...?" with the nearest of ``known``, else ``otherwise``."""
    spelled = {each.lower(): each for each in known}
    near = [spelled[each] for each in difflib.get_close_matches(name.lower(), list(spelled), n=3, cutoff=0.6)]
    return f"Did you mean {' or '.join(near)}?" if near else otherwise


def key_of(fields: str) -> str:
    """The dotted key of dotted fields: ``async_.max_staleness`` is ``async.max_staleness``."""
    group, dot, rest = fields.partition(".")
    return f"{group[:-1]}{dot}{rest}" if group[:-1] in RESERVED and group[-1:] == "_" else fields


def field_of(key: str) -> str:
    """The dotted fields of a dotted key: ``async.max_staleness`` is ``async_.max_staleness``."""
    group, dot, rest = key.partition(".")
    return f"{group}_{dot}{rest}" if group.rstrip("_") in RESERVED else key  # of async_ a name that no field has


def value_at(config: Any, key: str) -> Any:
    """The value of a dotted key; groups may be dataclasses or dicts.  Raises AttributeError or KeyError."""
    if isinstance(config, dict) and key in config:  # names in a mapping may have dots
        return config[key]
    name, dot, rest = key.partition(".")
    value = config[name] if isinstance(config, dict) else getattr(config, field_of(name))
    return value_at(value, rest) if dot else value


def has_key(config: Any, key: str) -> bool:
    """Whether ``value_at`` finds a value."""
    try:
        value_at(config, key)
    except (AttributeError, KeyError):
        return False
    return True
