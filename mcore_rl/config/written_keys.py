"""Which keys the user wrote, on the command line and in yaml files of the user's own.

What comes from our files and from the algorithm's object is nobody's words.  Neither is a file that chooses no
algorithm and says everything itself, as ``--cfg`` prints it and ``config.yaml`` of a run is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser


@dataclass(kw_only=True)
class Composed:
    """A configuration that knows what of it the user wrote.

    written: dotted keys; none where it was not composed, but made in Python.  It is no key itself.
    """

    written: frozenset[str] = field(default=frozenset(), compare=False, repr=False, metadata={"omegaconf_ignore": True})


def written_keys(overrides: Sequence[str], directory: Path | None, name: str) -> frozenset[str]:
    """The keys of ``overrides``, and those of the file ``name`` of ``directory`` and of its files that it stands on.

    All of them have been composed: nothing is wrong in them.
    """
    found = set[str]()
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        if not override.is_delete():
            found |= set(_leaves({override.key_or_group: override.value()}))
    if directory is not None:
        keys, chooses = _of_file(directory, name, frozenset())
        found |= keys if chooses else set()
    return frozenset(found)


def _of_file(directory: Path, name: str, above: frozenset[str]) -> tuple[set[str], bool]:
    """(its keys and those of the files it stands on, whether an algorithm is chosen by name)."""
    path = directory / f"{name}.yaml"
    if name in above or not path.is_file():
        return set(), name == "train"  # ours, which begins with one
    values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    defaults = values.pop("defaults", [])
    found, chooses = set(_leaves(values)), False
    for entry in defaults:
        if isinstance(entry, dict):
            chooses |= any(str(key).removeprefix("override ").strip() == "algorithm" for key in entry)
        elif entry != "_self_":
            keys, below = _of_file(directory, entry, above | {name})
            found, chooses = found | keys, chooses or below
    return found, chooses


def _leaves(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"
