"""Reward models that an engine runs: which checkpoints are one, and what is refused before its processes start.

A reward model is a decoder of one of the families with a head that gives one number in place of logits.  Its number for
a text is that of the last token, as in transformers' ``AutoModelForSequenceClassification``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mcore_rl.checkpoints.hf_directory import HfCheckpoint
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.reward_model import RewardModelConfig, reward_model_violations
from mcore_rl.config.rollout import kv_bytes_per_token, yarn_reach
from mcore_rl.errors import CheckpointError, ConfigError, Violation, refuse_if_any
from mcore_rl.families.config_json import read_config
from mcore_rl.families.registry import FAMILIES, model_of
from mcore_rl.parallel.device import Platform
from mcore_rl.rollout.engine.serving_checks import engine_violations, memory_violations

PATH = "reward_model.model.path"
LANGUAGE, CLASSIFIER = "ForCausalLM", "ForSequenceClassification"
REWARD = "Qwen2ForRewardModel"  # Qwen2.5-Math-RM's: its head has two layers (qwen2_rm.py in vLLM 0.32)
DEFAULT_LABELS = 2  # transformers', where config.json says nothing


def classifier_model(directory: Path, config: RewardModelConfig, platform: Platform) -> ModelConfig:
    """Return the decoder of the reward model in ``directory``, if an engine of ``config`` can run it on ``platform``.

    Raises ConfigError with everything found: no checkpoint, no architecture that is known, no head of one label, a
    field that is not supported, lengths or a layout that cannot be, weights and KV cache that do not fit the memory
    share.
    """
    found = reward_model_violations(config)
    try:
        values = read_config(directory)
    except CheckpointError as error:
        raise ConfigError([*found, *_unreadable(directory, error)]) from error
    architecture = _architecture(values)
    found += _architecture_violations(values, architecture)
    model = None
    if architecture is not None:
        try:
            _, model = model_of(values | {"architectures": [_decoder(architecture)]})
        except ConfigError as error:
            found += [replace(each, key=f"{PATH}: {each.key}") for each in error.violations]
    try:
        if model is not None and architecture is not None:
            found += _head_violations(directory, architecture, model.hidden_size)
            found += [_of_reward_model(each) for each in engine_violations(model, config, platform)]
            found += _context_violations(model, config)
            found += [_of_reward_model(each) for each in memory_violations(directory, config, platform)]
    except CheckpointError as error:
        found += _unreadable(directory, error)
    refuse_if_any(found)
    assert model is not None
    return model


def _architecture(values: Mapping[str, Any]) -> str | None:
    """Of a reward model that vLLM has; None where it is something else."""
    names = values.get("architectures")
    known = [_scoring(name) for family in FAMILIES.values() for name in family.architectures]
    return next((name for name in [*known, REWARD] if names == [name]), None)


def _scoring(language_model: str) -> str:
    return language_model.replace(LANGUAGE, CLASSIFIER)


def _decoder(architecture: str) -> str:
    """The architecture of the language model that has the same decoder."""
    return architecture.replace(CLASSIFIER, LANGUAGE).replace("ForRewardModel", LANGUAGE)


def _architecture_violations(values: Mapping[str, Any], architecture: str | None) -> list[Violation]:
    """Not a reward model, or one of more than one label."""
    if architecture is None:
        known = ", ".join([*(_scoring(name) for each in FAMILIES.values() for name in each.architectures), REWARD])
        names = values.get("architectures")
        language = isinstance(names, list) and len(names) == 1 and str(names[0]).endswith(LANGUAGE)
        problem = "is a language model, without a head that scores" if language else "is no reward model known here"
        remedy = f"Name a checkpoint of one of {known}"
        return [Violation(f"{PATH}: config.json: architectures", names, problem, remedy)]
    if architecture == REWARD:
        return []  # vLLM knows how many it has
    named = values.get("id2label")
    labels = len(named) if isinstance(named, dict) else values.get("num_labels", DEFAULT_LABELS)
    if labels == 1:
        return []
    problem = "is the number of the classifier's labels, and a reward is one number"
    remedy = 'Name a classifier of one label, whose config.json says "id2label": {"0": "LABEL_0"} or "num_labels": 1'
    return [Violation(f"{PATH}: config.json: num_labels", labels, problem, remedy)]


def _head_violations(directory: Path, architecture: str, hidden_size: int) -> list[Violation]:
    """vLLM's loader says nothing of a head that is missing, and takes a bias that transformers ignores."""
    wanted: dict[str, tuple[int, ...]] = {"score.weight": (1, hidden_size)}
    if architecture == REWARD:
        inner = {"score.0.weight": (hidden_size, hidden_size), "score.0.bias": (hidden_size,)}
        wanted = inner | {"score.2.weight": (1, hidden_size), "score.2.bias": (1,)}
    with HfCheckpoint.open(directory) as checkpoint:
        held = {name: info.shape for name, info in checkpoint.tensors.items() if name.startswith("score.")}
    if held == wanted:
        return []
    written = {key: ", ".join(f"{name} {list(shape)}" for name, shape in each.items()) or "none"
               for key, each in (("held", held), ("wanted", wanted))}  # fmt: skip
    problem = f"the head of a {architecture} of one label is {written['wanted']}, and the files have {written['held']}"
    return [Violation(PATH, str(directory), problem, "Name the checkpoint of a trained reward model")]


def _context_violations(model: ModelConfig, config: RewardModelConfig) -> list[Violation]:
    limit = min(model.max_position_embeddings, yarn_reach(model) or model.max_position_embeddings)
    length, found = config.max_model_len, []
    if length > limit:
        problem = f"exceeds the {limit} tokens that the reward model reads"
        remedy = f"Write up to {limit}, with reward_model.truncation=left where conversations are longer"
        found.append(Violation("reward_model.max_length", length, problem, remedy))
    least = kv_bytes_per_token(model, config) * length
    if config.kv_cache_memory_bytes is not None and config.kv_cache_memory_bytes < least:
        problem = f"does not hold one conversation of {length} tokens, which takes {least}"
        remedy = f"Write {least} times the conversations that shall be scored at once, or lower reward_model.max_length"
        found.append(Violation("reward_model.kv_cache_memory_bytes", config.kv_cache_memory_bytes, problem, remedy))
    return found


def _of_reward_model(violation: Violation) -> Violation:
    """Rewrite a violation of a ``rollout.*`` key as one of ``reward_model.*``."""
    said = (text.replace("rollout.", "reward_model.") for text in (violation.problem, violation.remedy))
    return Violation(violation.key.replace("rollout.", "reward_model."), violation.value, *said)


def _unreadable(directory: Path, error: CheckpointError) -> list[Violation]:
    found = []
    for problem in error.problems:
        said, _, remedy = problem.rpartition(". ")
        found.append(Violation(PATH, str(directory), said, remedy))
    return found
