"""Refuses a checkpoint beside another model's configuration: field by field, by the config.json that it keeps.

Rope theta, norm epsilon, experts per token and the like stand in no tensor, so that a checkpoint loads beside any of
them, and computes something else than it was trained to.  Every checkpoint that this package writes keeps its
config.json; one of another tool may have none, of which nothing can be said.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mcore_rl.config.model import ModelConfig
from mcore_rl.families.config_json import CONFIG, read_config
from mcore_rl.families.registry import model_of
from mcore_rl.ground.errors import CheckpointError

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
        for name, theirs, ours in model_differences(_model_of_any_head(read_config(kept), like=model), model)
    ]
    if problems:
        remedy = "Give the config.json that it was trained with; if the change is meant, make it in its own too"
        raise CheckpointError(str(directory), [*problems[:-1], f"{problems[-1]}. {remedy}"])


def model_differences(one: ModelConfig, other: ModelConfig) -> list[tuple[str, Any, Any]]:
    """(field, its value in ``one``, in ``other``) of every field that changes numbers and is not the same."""
    return list(_differences(asdict(one), asdict(other)))


def _differences(one: dict[str, Any], other: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    for name, mine in one.items():
        theirs = other[name]
        if isinstance(mine, dict) and isinstance(theirs, dict):
            yield from _differences(mine, theirs, f"{prefix}{name}.")
        elif mine != theirs and name not in NOT_COMPARED:
            yield f"{prefix}{name}", mine, theirs


def _model_of_any_head(config: dict[str, Any], *, like: ModelConfig) -> ModelConfig:
    """The model of ``config``; a critic's is that of the language model that it began with.

    like: sees pictures where that is to.
    """
    named = config.get("architectures") or []
    causal = [str(name).replace("ForSequenceClassification", "ForCausalLM") for name in named]
    return model_of(config | {"architectures": causal}, pictures=like.vision is not None)[1]


def _json(value: Any) -> str:
    return json.dumps(value, default=lambda enum: enum.value)
