"""The checkpoints of ``model_configs/``: one yaml each, with the Hugging Face id, the family and layouts that fit.

A yaml never repeats ``config.json``: sizes come from the checkpoint itself, or, without a download, from the published
configurations in ``hf_configs.json`` beside the yamls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from mcore_rl.config.parallel import ParallelConfig, parse_layout
from mcore_rl.config.rollout import RolloutLayout, parse_rollout_layout
from mcore_rl.families.registry import FAMILIES
from mcore_rl.families.towers import PICTURES
from mcore_rl.ground.errors import ConfigError, Violation, refuse_if_any

HARDWARE = {"h100_80gb": 80, "h200_141gb": 141, "mi300x_192gb": 192}  # memory of one GPU, 10**9 bytes

MISSING = ("there is no such directory", "has no config.json")  # as config/files.py and planning/recipes.py begin

_KEYS = {"hf_id": str, "family": str, "presets": dict}
_PRESET_KEYS = {"num_gpus": int, "training": str, "rollout": str}


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Layouts of the policy's training and of its rollouts, taking turns on the same ``num_gpus`` GPUs."""

    num_gpus: int
    training: ParallelConfig
    rollout: RolloutLayout


@dataclass(frozen=True, kw_only=True)
class KnownCheckpoint:
    """One yaml.  name: its stem.  presets: by hardware (a key of ``HARDWARE``); empty for the tests' tiny models."""

    name: str
    hf_id: str
    family: str
    presets: Mapping[str, Preset]


def known_checkpoints(folder: Path) -> dict[str, KnownCheckpoint]:
    """Every checkpoint below ``folder`` (``model_configs/``) by name.

    Raises ConfigError with every violation in any of the yamls.
    """
    checkpoints: dict[str, KnownCheckpoint] = {}
    problems: list[Violation] = []
    for path in sorted(folder.glob("*/*.yaml")):
        try:
            checkpoints[path.stem] = _read(path)
        except ConfigError as error:
            problems += error.violations
    refuse_if_any(problems)
    return checkpoints


def offered(violations: Sequence[Violation], folder: Path) -> list[Violation]:
    """``violations``; where a missing directory has the name of a known checkpoint, the remedy is its Hub id.

    A bare name is never looked for on the Hub: anybody could have put something there.
    """
    if not any(each.problem.startswith(MISSING) for each in violations):
        return [*violations]
    by_name = {each.hf_id.rpartition("/")[2].lower(): each.hf_id for each in known_checkpoints(folder).values()}
    made = list[Violation]()
    for each in violations:
        hf_id = by_name.get(Path(str(each.value)).name.lower(), "")
        if each.problem.startswith(MISSING) and "/" in hf_id:
            remedy = f"Write {hf_id}, its id on the Hub, and it is downloaded; or the path of a directory"
            each = replace(each, remedy=remedy)
        made.append(each)
    return made


def find_checkpoint(name: str, folder: Path) -> KnownCheckpoint:
    """The checkpoint of ``name``: its name, the unique name that starts with it, or its Hugging Face id.

    Raises ConfigError with the nearest names if there is none, or more than one.
    """
    known = known_checkpoints(folder)
    wanted = name.lower()
    exact = [checkpoint for checkpoint in known.values() if wanted in (checkpoint.name, checkpoint.hf_id.lower())]
    matches = exact or [checkpoint for checkpoint in known.values() if checkpoint.name.startswith(wanted)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        names = [checkpoint.name for checkpoint in matches]
        problem = "is the beginning of several names"
    else:
        names = get_close_matches(wanted, known, n=5, cutoff=0.3) or list(known)
        problem = "is no known checkpoint"
    raise ConfigError([Violation("model", name, problem, f"Write one of {', '.join(names)}")])


def published_config(checkpoint: KnownCheckpoint, folder: Path) -> dict[str, Any]:
    """The published ``config.json`` of ``checkpoint``, from ``hf_configs.json`` in ``folder``.

    Raises ConfigError if the file lacks it.
    """
    facts: dict[str, dict[str, Any]] = json.loads((folder / "hf_configs.json").read_text(encoding="utf-8"))
    if checkpoint.hf_id not in facts:
        problem = "has no entry in hf_configs.json"
        raise ConfigError([Violation("hf_id", checkpoint.hf_id, problem, "Add the checkpoint's config.json there")])
    return facts[checkpoint.hf_id]


def _read(path: Path) -> KnownCheckpoint:
    place = f"{path.parent.name}/{path.name}"
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        problem = f"is no yaml: {str(error).splitlines()[0]}"
        raise ConfigError([Violation(place, "...", problem, "Mend it")]) from None
    _check_keys(place, values, _KEYS)
    violations = []
    known = FAMILIES | PICTURES
    if values["family"] not in known or values["family"] != path.parent.name:
        remedy = f"Name the folder and the family alike, one of {', '.join(known)}"
        violations.append(
            Violation(f"{place}: family", values["family"], f"is in the folder {path.parent.name}", remedy)
        )
    for hardware in values["presets"]:
        if hardware not in HARDWARE:
            remedy = f"Write some of {', '.join(HARDWARE)}"
            violations.append(Violation(f"{place}: presets", hardware, "no such hardware", remedy))
    refuse_if_any(violations)
    presets = {hardware: _preset(f"{place}: {hardware}", preset) for hardware, preset in values["presets"].items()}
    return KnownCheckpoint(name=path.stem, hf_id=values["hf_id"], family=values["family"], presets=presets)


def _preset(place: str, values: dict[str, Any]) -> Preset:
    layers = values.pop("pipeline_layers", None) if isinstance(values, dict) else None
    _check_keys(place, values, _PRESET_KEYS)
    if layers is not None and not (isinstance(layers, list) and all(type(count) is int for count in layers)):
        problem = "is no list of integers"
        remedy = "Write the layers of each stage"
        raise ConfigError([Violation(f"{place}: pipeline_layers", layers, problem, remedy)])
    try:
        training = parse_layout(values["training"])
        rollout = parse_rollout_layout(values["rollout"])
    except ConfigError as error:
        raise ConfigError(
            [replace(violation, key=f"{place}: {violation.key}") for violation in error.violations]
        ) from None
    training.pipeline_layers = layers
    return Preset(num_gpus=values["num_gpus"], training=training, rollout=rollout)


def _check_keys(place: str, values: object, kinds: Mapping[str, type]) -> None:
    wanted = ", ".join(kinds)
    if not isinstance(values, dict) or set(values) != set(kinds):
        raise ConfigError([Violation(place, values, "has other keys than it should", f"Write {wanted}")])
    refuse_if_any(
        [
            Violation(f"{place}: {key}", values[key], f"is no {kind.__name__}", f"Write a {kind.__name__}")
            for key, kind in kinds.items()
            if type(values[key]) is not kind
        ]
    )
