"""Reads the ``config.json`` of a Hugging Face directory, as transformers and vLLM do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mcore_rl.config.files import input_problem
from mcore_rl.ground.errors import CheckpointError
from mcore_rl.ground.json_text import read_json

CONFIG = "config.json"


def read_config(directory: Path) -> dict[str, Any]:
    """The ``config.json`` of ``directory``.  Raises CheckpointError if it cannot be read or is no JSON object."""
    remedy = "Name the directory of a Hugging Face model"
    if (problem := input_problem(directory / CONFIG)) and (directory / CONFIG).exists():
        raise CheckpointError(str(directory), [f"config.json: {problem[0]}. {remedy}"])
    try:
        config = read_json((directory / CONFIG).read_bytes())
    except OSError as error:
        raise CheckpointError(str(directory), [f"config.json: cannot be read: {error.strerror}. {remedy}"]) from error
    except ValueError as error:
        raise CheckpointError(str(directory), [f"config.json: is not JSON ({error}). {remedy}"]) from error
    if not isinstance(config, dict):
        raise CheckpointError(str(directory), [f"config.json: is no JSON object. {remedy}"])
    return config
