"""Refuses a checkpoint beside another model's configuration: field by field, by the config.json that it keeps.

Rope theta, norm epsilon, experts per token and the like stand in no tensor, so that a checkpoint loads beside any of
them, and computes something else than it was trained to.  Every checkpoint that this package writes keeps its
config.json; one of another tool may have none, of which nothing can be said.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Any

from mcore_rl.config.model import ModelConfig
from mcore_rl.errors import CheckpointError
from mcore_rl.families.config_json import CONFIG, read_config
from mcore_rl.families.registry import model_of

# How long a sequence may be is decided by who loads the weights; what a length changes in the rope is in its fields.
NOT_COMPARED = {"max_position_embeddings"}


def demand_kept_model(directory: Path, kept: Path, model: ModelConfig) -> None:
    """Raises CheckpointError with every field in which ``model`` is not the model of the checkpoint ``directory``.

    kept: where the checkpoint keeps its config.json; without one, nothing is compared.
    Raises as ``read_config`` and ``model_of`` do if that file cannot be read.
    """
    if not (kept / CONFIG).exists():
        return
    problems = [
        f"{name}: {_json(theirs)} in its own {kept.name}/{CONFIG}, {_json(ours)} in the one given"
        for name, theirs, ours in model_differences(_model_of_any_head(read_config(kept)), model)
    ]
    if problems:
        remedy = "Give the config.json that it was trained with; if the change is meant, make it in its own too"
        raise CheckpointError(str(directory), [*problems[:-1], f"{problems[-1]}. {remedy}"])


def model_differences(one: ModelConfig, other: ModelConfig) -> list[tuple[str, Any, Any]]:
    """(field, its value in ``one``, in ``other``) of every field that changes numbers and is not the same."""
    flat, others = _flat(asdict(one)), _flat(asdict(other))
    names = [name for name in dict.fromkeys([*flat, *others]) if name not in NOT_COMPARED]
    return [(name, flat.get(name), others.get(name)) for name in names if flat.get(name) != others.get(name)]


def _model_of_any_head(config: dict[str, Any]) -> ModelConfig:
    """The model of ``config``; a critic's is that of the language model that it began with."""
    named = config.get("architectures") or []
    causal = [str(name).replace("ForSequenceClassification", "ForCausalLM") for name in named]
    return model_of(config | {"architectures": causal})[1]


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _json(value: Any) -> str:
    return json.dumps(value.value if isinstance(value, Enum) else value)
