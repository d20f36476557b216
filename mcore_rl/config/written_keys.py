"""Finds the keys that the user wrote, on the command line and in the user's own yaml files.

Keys of the package's files and of the algorithm's object do not count.  Neither do those of a complete configuration
that chooses no algorithm, such as the output of ``--cfg`` or the ``config.yaml`` of a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(kw_only=True)
class Composed:
    """A configuration that knows which of its keys the user wrote.

    written: dotted keys; empty if the configuration was made in Python instead of composed.  Not itself a key.
    """

    written: frozenset[str] = field(default=frozenset(), compare=False, repr=False, metadata={"omegaconf_ignore": True})


def written_keys(overrides: Sequence[str], directory: Path | None, name: str) -> frozenset[str]:
    """The dotted keys in ``overrides``, in ``directory``/``name``.yaml, and in the files that its defaults name there.

    All of them must have been composed already, and therefore be valid.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser  # a tenth of a second; --help needs none

    written = set[str]()
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        if not override.is_delete():
            written |= set(_leaves({override.key_or_group: override.value()}))
    if directory is not None:
        keys, chooses = _of_file(directory, name, frozenset())
        written |= keys if chooses else set()
    return frozenset(written)


def _of_file(directory: Path, name: str, above: frozenset[str]) -> tuple[set[str], bool]:
    """(the keys of the file and of those that its defaults name, whether these choose an algorithm by name)."""
    from mcore_rl.config.yaml_files import read_yaml

    path = directory / f"{name}.yaml"
    if name in above or not path.is_file():
        return set(), name == "train"  # the package's train.yaml chooses an algorithm
    values = read_yaml(path)
    defaults = values.pop("defaults", [])
    written, chooses = set(_leaves(values)), False
    for entry in defaults:
        if isinstance(entry, dict):
            chooses |= any(str(key).removeprefix("override ").strip() == "algorithm" for key in entry)
        elif entry != "_self_":
            keys, below = _of_file(directory, entry, above | {name})
            written, chooses = written | keys, chooses or below
    return written, chooses


def _leaves(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"
