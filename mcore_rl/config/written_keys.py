"""The record of the keys that the user wrote, on the command line and in yaml files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

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
