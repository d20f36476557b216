"""verl's own keys, with their defaults by version, as ``tools/record_verl.py`` recorded them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

KEYS = Path(__file__).with_name("keys.json")
# verl's names of its configurations.
MEGATRON = "ppo_megatron_trainer"
FSDP = "ppo_trainer"
GENERATION = "generation"
EVALUATION = "evaluation"
SFT = "sft_trainer_engine"
EARLY_SFT = "sft_trainer"
PROGRAM = {  # verl's configuration -> our program
    MEGATRON: "train",
    FSDP: "train",
    SFT: "sft",
    EARLY_SFT: "sft",
    GENERATION: "generate",
    EVALUATION: "evaluate",
}
CONFIGS = tuple(PROGRAM)


@dataclass(frozen=True)
class VerlGroups:
    """Where verl has the settings of a trained role: its own group, its model's, its optimizer's, Megatron's."""

    role: str
    model: str
    optim: str
    megatron: str


VERL_GROUPS = {  # our program -> our role -> verl's groups
    "train": {
        role: VerlGroups(verl, model, f"{verl}.optim", f"{verl}.megatron")
        for role, verl, model in (
            ("actor", "actor_rollout_ref.actor", "actor_rollout_ref.model"),
            ("critic", "critic", "critic.model"),
        )
    },
    "sft": {"actor": VerlGroups("data", "model", "optim", "engine")},
}


@dataclass(frozen=True)
class VersionRange:
    """The versions of verl, both included, in which a key has one default."""

    since: str
    until: str
    default: Any


@cache
def versions() -> tuple[str, ...]:
    """The versions that are known, oldest first."""
    return tuple(_recorded()["versions"])


@cache
def keys_of(config: str) -> Mapping[str, tuple[VersionRange, ...]]:
    """Every key of a configuration of verl's, in any version."""
    recorded = _recorded()
    chosen = dict(recorded[config] if config != FSDP else recorded[MEGATRON] | recorded[FSDP])
    return {key: tuple(VersionRange(*each) for each in ranges) for key, ranges in chosen.items() if ranges is not None}


@cache
def defaults(config: str, version: str) -> Mapping[str, Any]:
    """The keys that a configuration has in ``version``, with their defaults; interpolations as they are written."""
    place = versions().index(version)
    return {
        key: each.default
        for key, ranges in keys_of(config).items()
        for each in ranges
        if versions().index(each.since) <= place <= versions().index(each.until)
    }


def newest_with(config: str, keys: Collection[str]) -> str:
    """The newest version of a configuration that has the most of ``keys``: which one they were written for."""
    return max(reversed(versions()), key=lambda version: sum(key in defaults(config, version) for key in keys))


def versions_with(config: str, keys: Collection[str]) -> list[str]:
    """The versions of a configuration that have every one of ``keys`` that any of them has."""
    known = [key for key in keys if key in keys_of(config)]
    return [version for version in versions() if all(key in defaults(config, version) for key in known)]


def span(key: str) -> str:
    """The versions that have ``key``, for people: "0.4 to 0.5", "since 0.6"; "" if all have it, or none."""
    ranges = [each for config in CONFIGS for each in keys_of(config).get(key, ())]
    if not ranges:
        return ""
    places = [versions().index(version) for each in ranges for version in (each.since, each.until)]
    first, last = (versions()[place] for place in (min(places), max(places)))
    short = {version: version.rpartition(".")[0] if version.endswith(".0") else version for version in versions()}
    if last == versions()[-1]:
        return "" if first == versions()[0] else f"since {short[first]}"
    return f"until {short[last]}" if first == versions()[0] else f"{short[first]} to {short[last]}"


@cache
def _recorded() -> dict[str, Any]:
    recorded: dict[str, Any] = json.loads(KEYS.read_text(encoding="utf-8"))
    return recorded
