"""Recognises the checkpoint of a reward model, and refuses what an engine cannot run before its processes start.

A reward model is a decoder of one of the families whose head gives one number instead of logits.  The score of a text
is the number at its last token, as in transformers' ``AutoModelForSequenceClassification``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mcore_rl.checkpoints.hf_directory import HfCheckpoint
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.reward_model import RewardModelConfig, reward_model_violations
from mcore_rl.config.rollout import sequence_bytes, yarn_reach
from mcore_rl.errors import CheckpointError, ConfigError, Violation, refuse_if_any, violations_of
from mcore_rl.families.config_json import read_config
from mcore_rl.families.registry import FAMILIES, model_of
from mcore_rl.parallel.device import Platform
from mcore_rl.rollout.vllm.engine.serving_checks import engine_violations, memory_violations

PATH = "reward_model.model.path"
LANGUAGE, CLASSIFIER = "ForCausalLM", "ForSequenceClassification"
REWARD = "Qwen2ForRewardModel"  # Qwen2.5-Math-RM's: its head has two layers (qwen2_rm.py in vLLM 0.32)
DEFAULT_LABELS = 2  # transformers' default, if config.json does not say


def classifier_model(directory: Path, config: RewardModelConfig, platform: Platform) -> ModelConfig:
    """Returns the decoder of the reward model in ``directory`` if an engine of ``config`` can run it on ``platform``.

    Raises ConfigError with every violation: no checkpoint, an unknown architecture, no head with one label, a field
    that is not supported, impossible lengths or layouts, weights and KV cache that do not fit the memory share.
    """
    violations = reward_model_violations(config)
    try:
        values = read_config(directory)
    except CheckpointError as error:
        raise ConfigError([*violations, *violations_of(PATH, str(directory), error.problems)]) from error
    architecture = _architecture(values)
    violations += _architecture_violations(values, architecture)
    model = None
    if architecture is not None:
        try:
            _, model = model_of(values | {"architectures": [_decoder(architecture)]})
        except ConfigError as error:
            violations += [replace(each, key=f"{PATH}: {each.key}") for each in error.violations]
    try:
        if model is not None and architecture is not None:
            violations += _head_violations(directory, architecture, model.hidden_size)
            violations += [_of_reward_model(each) for each in engine_violations(model, config, platform)]
            violations += _context_violations(model, config)
            violations += [_of_reward_model(each) for each in memory_violations(directory, config, platform)]
    except CheckpointError as error:
        violations += violations_of(PATH, str(directory), error.problems)
    refuse_if_any(violations)
    assert model is not None
    return model


def _architecture(values: Mapping[str, Any]) -> str | None:
    """The architecture in config.json's ``values`` if it is of a reward model that vLLM can run; else None."""
    names = values.get("architectures")
    known = [_scoring(name) for family in FAMILIES.values() for name in family.architectures]
    return next((name for name in [*known, REWARD] if names == [name]), None)


def _scoring(language_model: str) -> str:
    return language_model.replace(LANGUAGE, CLASSIFIER)


def _decoder(architecture: str) -> str:
    """The architecture of the language model that has the same decoder."""
    return architecture.replace(CLASSIFIER, LANGUAGE).replace("ForRewardModel", LANGUAGE)


def _architecture_violations(values: Mapping[str, Any], architecture: str | None) -> list[Violation]:
    """Refuses a checkpoint that is not of a reward model, or that has more than one label."""
    if architecture is None:
        known = ", ".join([*(_scoring(name) for each in FAMILIES.values() for name in each.architectures), REWARD])
        names = values.get("architectures")
        language = isinstance(names, list) and len(names) == 1 and str(names[0]).endswith(LANGUAGE)
        problem = "is a language model, without a head that scores" if language else "is no reward model known here"
        remedy = f"Name a checkpoint of one of {known}"
        return [Violation(f"{PATH}: config.json: architectures", names, problem, remedy)]
    if architecture == REWARD:
        return []  # vLLM fixes the number of its labels
    named = values.get("id2label")
    labels = len(named) if isinstance(named, dict) else values.get("num_labels", DEFAULT_LABELS)
    if labels == 1:
        return []
    problem = "is the number of the classifier's labels, and a reward is one number"
    remedy = 'Name a classifier of one label, whose config.json says "id2label": {"0": "LABEL_0"} or "num_labels": 1'
    return [Violation(f"{PATH}: config.json: num_labels", labels, problem, remedy)]


def _head_violations(directory: Path, architecture: str, hidden_size: int) -> list[Violation]:
    """Refuses a wrong head: vLLM's loader does not notice a missing one, and loads a bias that transformers ignores."""
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
    length, violations = config.max_model_len, []
    if length > limit:
        problem = f"exceeds the {limit} tokens that the reward model reads"
        remedy = f"Write up to {limit}, with reward_model.truncation=left where conversations are longer"
        violations.append(Violation("reward_model.max_length", length, problem, remedy))
    least = sequence_bytes(model, config, length)
    if config.kv_cache_memory_bytes is not None and config.kv_cache_memory_bytes < least:
        problem = f"does not hold one conversation of {length} tokens, which takes {least}"
        remedy = f"Write {least} times the conversations that shall be scored at once, or lower reward_model.max_length"
        violations.append(
            Violation("reward_model.kv_cache_memory_bytes", config.kv_cache_memory_bytes, problem, remedy)
        )
    return violations


def _of_reward_model(violation: Violation) -> Violation:
    """Rewrites a violation of a ``rollout.*`` key as one of ``reward_model.*``."""
    said = (text.replace("rollout.", "reward_model.") for text in (violation.problem, violation.remedy))
    return Violation(violation.key.replace("rollout.", "reward_model."), violation.value, *said)
