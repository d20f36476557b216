"""Refuses checkpoints of another architecture, whose weights cannot take each other's place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path

from mcore_rl.families.config_json import read_config
from mcore_rl.families.registry import model_of
from mcore_rl.ground.errors import Violation

MAX_FIELDS = 4


def architecture_violations(
    checkpoints: Mapping[str, str], folder: Callable[[str], Path] = Path, *, pictures: bool = False
) -> Iterator[Violation]:
    """A violation for each of ``checkpoints``, by key, that is of another family or model than the first.

    folder: where the config.json of a checkpoint is.  pictures: compare vision towers, too.  Raises ConfigError if one
    cannot be read.
    """
    (first, path), *others = checkpoints.items()
    read = {
        each: model_of(read_config(folder(each)), pictures=pictures) for each in dict.fromkeys(checkpoints.values())
    }
    family, model = read[path]
    for key, other in others:
        other_family, other_model = read[other]
        pairs = [("family", family.name, other_family.name)] if family.name != other_family.name else []
        pairs += [
            (each.name, getattr(model, each.name), getattr(other_model, each.name))
            for each in fields(model)
            if getattr(model, each.name) != getattr(other_model, each.name)
        ]
        if pairs:
            differ = ", ".join(f"{name} {here} and not {there}" for name, there, here in pairs[:MAX_FIELDS])
            more = f" and {len(pairs) - MAX_FIELDS} more" if pairs[MAX_FIELDS:] else ""
            problem = f"is another architecture than {first}={path}: {differ}{more}"
            yield Violation(key, other, problem, "Name checkpoints of one architecture")
