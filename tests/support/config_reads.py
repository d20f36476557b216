"""Records which fields of a configuration running code reads: the names that it looks up on a ``PreTrainedConfig``."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from mcore_rl.rollout.vllm import oracle
from tests.support.published import class_config


@contextmanager
def recorded_reads() -> Iterator[set[str]]:
    """While active, adds every name that is looked up on any configuration, whether or not it is there."""
    names: set[str] = set()
    before = PreTrainedConfig.__getattribute__

    def recording(self: PreTrainedConfig, name: str) -> Any:
        names.add(name)
        return before(self, name)

    PreTrainedConfig.__getattribute__ = recording  # type: ignore[method-assign, assignment]
    try:
        yield names
    finally:
        PreTrainedConfig.__getattribute__ = before  # type: ignore[method-assign]


def fields_among(names: set[str]) -> set[str]:
    """``names`` without methods of the class and Python's own names."""
    return {name for name in names if not name.startswith("__") and not callable(getattr(PreTrainedConfig, name, None))}


def transformers_reads(facts: dict[str, Any]) -> set[str]:
    """What transformers reads to make the configuration ``facts`` and its model, and to train a step of it."""
    with recorded_reads() as names:
        model = AutoModelForCausalLM.from_config(class_config(copy.deepcopy(facts)))
        model.train()
        tokens = torch.arange(8)[None]
        model(input_ids=tokens, labels=tokens).loss.backward()
    return fields_among(names)


def vllm_reads(source: Path, layout: Any) -> set[str] | str:
    """What vLLM reads to make the model of ``source``, in its process; a text: why it refuses."""
    with recorded_reads() as names:
        described = oracle._on_each_rank(oracle._describe, source, layout, "float32")
    return described if isinstance(described, str) else fields_among(names)
