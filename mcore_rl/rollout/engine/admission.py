"""Checks whether an engine may start, from the configuration, ``config.json`` and the headers of the weights.

An engine takes seconds to minutes to start, and then fails in a process of its own; almost every mistake of a user can
be seen before.  The preparation of a run calls ``admit`` before any process is started; ``start_engine`` calls it again
on the engine's machine, which may lack the files.
"""

from __future__ import annotations

from pathlib import Path

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.reward_model import RewardModelConfig
from mcore_rl.config.rollout import (
    Quantization,
    RolloutConfig,
    ServingConfig,
    context_violations,
    quantization_of,
    rollout_config_violations,
)
from mcore_rl.errors import ConfigError, Violation, refuse_if_any
from mcore_rl.families.config_json import read_config
from mcore_rl.families.registry import model_of
from mcore_rl.families.text_part import text_config
from mcore_rl.parallel.device import Platform
from mcore_rl.rollout.engine.classifier import classifier_model
from mcore_rl.rollout.engine.environment import has_tokenizer
from mcore_rl.rollout.engine.serving_checks import (
    demand_tested_vllm,
    engine_violations,
    memory_violations,
    quantization_violations,
    why_unrecorded,
)


def admit(directory: Path, config: ServingConfig, platform: Platform, *, pictures: bool = False) -> ModelConfig:
    """Returns the model in ``directory`` if an engine of ``config`` can run it on ``platform``.

    config: a RolloutConfig's engine generates, a RewardModelConfig's engine classifies.
    pictures: a multimodal checkpoint is run as the whole that sees pictures; else its text part is.

    Raises RolloutError: an untested version of vLLM.  CheckpointError: no readable config.json.  ConfigError with every
    violation: a family or a field that is not supported; impossible values, lengths or layouts; weights and KV cache
    that do not fit the memory share.
    """
    demand_tested_vllm()
    if isinstance(config, RolloutConfig):
        return _language_model(directory, config, platform, pictures=pictures)
    assert isinstance(config, RewardModelConfig) and not pictures, "a classifier reads text"
    return classifier_model(directory, config, platform)


def demand_plain_weights(directory: Path, config: ServingConfig) -> None:
    """Refuses to quantise once more what is quantised in the files that an engine reads itself.

    An engine that awaits its weights gets plain numbers.  Raises ConfigError.
    """
    form = quantization_of(config)
    stored = text_config(read_config(directory)).get("quantization_config") or {}
    if form is not Quantization.none and stored:
        problem = f"{directory} is in {stored.get('quant_method', 'a form of its own')} already, and vLLM takes one"
        remedy = "Write rollout.quantization=none, or write the checkpoint in bfloat16: mcore-rl convert dequantise"
        raise ConfigError([Violation("rollout.quantization", form.value, problem, remedy)])


def _language_model(directory: Path, rollout: RolloutConfig, platform: Platform, *, pictures: bool) -> ModelConfig:
    config = read_config(directory)
    refuse_if_any(rollout_config_violations(rollout))
    family, model = model_of(config, pictures=pictures)
    violations = engine_violations(model, rollout, platform) + context_violations(model, rollout)
    if not violations:
        violations += quantization_violations(family, model, rollout, platform)
    if rollout.stop and not has_tokenizer(directory):
        problem = f"{directory} has no tokenizer, so that responses have no text"
        violations.append(Violation("rollout.stop", rollout.stop, problem, "Write rollout.stop_token_ids"))
    unrecorded = "the model has no experts" if model.moe is None else why_unrecorded(platform)
    if rollout.return_routed_experts and unrecorded is not None:
        violations.append(Violation("actor.router_replay", "r3", unrecorded, "Write actor.router_replay=r2, or off"))
    refuse_if_any(violations + memory_violations(directory, rollout, platform, pictures=pictures))
    return model
