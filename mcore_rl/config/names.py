"""Names of keys: the nearest known ones for one that does not exist, and the fields that have them.

A key is what a user writes.  Its field has the same name, but where Python reserves the word: the group ``async`` is
the field ``async_``.  ``Composed`` records which keys the user wrote.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

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


IGNORED = {"omegaconf_ignore": True}  # metadata of a field that is no key


@dataclass(kw_only=True)
class Composed:
    """A configuration that knows which of its keys the user wrote.

    written: dotted keys; empty if the configuration was made in Python instead of composed.  Not itself a key.
    absent: those of ``written`` that the configuration has no place for, and their values.  Not itself a key.
    """

    written: frozenset[str] = field(default=frozenset(), compare=False, repr=False, metadata=IGNORED)
    absent: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False, metadata=IGNORED)

    @classmethod
    def schema_for(cls, tree: Mapping[str, Any]) -> type[Self]:
        """The schema that the values of ``tree`` are read by: this one, or one with more keys."""
        return cls

    def narrowed(self) -> Self:
        """This configuration without keys that it does not choose: itself, or an instance of another schema."""
        return self


def leaves(values: Mapping[str, Any]) -> Iterator[str]:
    """The dotted keys of a tree of groups; an empty group is a key."""
    return (key for key, _ in leaf_values(values))


def leaf_values(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of each leaf of a tree of groups."""
    return ((".".join(map(str, path)), value) for path, value in leaf_paths(values))


def leaf_paths(values: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(names one below the other, value) of each leaf of a tree of groups: names of mappings may have dots."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaf_paths(value, (*path, name))
        else:
            yield (*path, name), value
