"""Reads the user's yaml files, within limits: an alias may otherwise stand for more than any memory holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from mcore_rl.config.files import input_problem
from mcore_rl.errors import ConfigError, Violation

MAX_BYTES = 128 << 10  # the parser takes seconds for more
MAX_VALUES = 100_000  # with every alias written out
MAX_DEPTH = 32


def read_yaml(path: Path) -> dict[str, Any]:
    """The keys and values of a yaml file; {} if it is empty.

    Raises ConfigError if it cannot be read, is no yaml, exceeds the limits above, or holds no keys.
    """
    text = read_limited(path, MAX_BYTES)
    try:
        _demand_small(text)
        values = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        problem = ", ".join(line.strip() for line in str(error).splitlines())
        raise ConfigError([Violation(str(path), "", problem, "Mend the file")]) from error
    if values is None:
        return {}
    if isinstance(values, dict):
        return {str(key): value for key, value in values.items()}
    raise ConfigError([Violation(str(path), "", "holds no keys", "Write `key: value` lines")])


def read_limited(path: Path, max_bytes: int) -> str:
    """The text of a regular file of at most ``max_bytes``.  Raises ConfigError if it is none."""
    try:
        problem = input_problem(path)
        if problem is None and (size := path.stat().st_size) > max_bytes:
            problem = f"has {size:,} bytes, and at most {max_bytes:,} are read", "Write a smaller file"
        text = "" if problem else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = f"cannot be read: {error}", "Mend the file"
    if problem:
        raise ConfigError([Violation(str(path), "", *problem)])
    return text


def check_defaults(directory: Path, name: str, chosen: Iterator[str] | list[str]) -> None:
    """Reads what hydra is about to: ``directory``/``name``.yaml and the files that its defaults name there.

    chosen: further files of the directory, such as ``group/name`` of an override.
    Raises ConfigError, as ``read_yaml``.
    """
    seen, waiting = set[str](), [name, *chosen]
    while waiting:
        name = waiting.pop()
        path = directory / f"{name}.yaml"
        if name in seen or not path.exists():
            continue
        seen.add(name)
        defaults = read_yaml(path).get("defaults")
        for entry in defaults if isinstance(defaults, list) else ():
            if isinstance(entry, dict):
                groups = ((str(key).split()[-1] if str(key).split() else "", each) for key, each in entry.items())
                waiting += [f"{group}/{each}" for group, each in groups]
            else:
                waiting.append(str(entry))


def _demand_small(text: str) -> None:
    """Raises ValueError if ``text`` nests too deep, or has too many values once every alias is written out."""
    counts, anchors, names = [0], dict[str, int](), list[str | None]()
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            if event.anchor in names:
                raise ValueError(f"*{event.anchor} is an alias of what it stands in")
            counts[-1] += anchors.get(event.anchor, 0)
        elif isinstance(event, yaml.ScalarEvent):
            counts[-1] += 1
            anchors |= {event.anchor: 1} if event.anchor else {}
        elif isinstance(event, yaml.CollectionStartEvent):
            counts.append(1)
            names.append(event.anchor)
        elif isinstance(event, yaml.CollectionEndEvent):
            count, name = counts.pop(), names.pop()
            counts[-1] += count
            anchors |= {name: count} if name else {}
        if len(counts) > MAX_DEPTH:
            raise ValueError(f"nests deeper than {MAX_DEPTH}")
        if counts[-1] > MAX_VALUES:
            raise ValueError(f"has more than {MAX_VALUES:,} values, with every alias written out")
