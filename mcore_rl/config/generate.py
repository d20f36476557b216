"""The configuration of ``mcore-rl generate``: prompts in, responses out, no training.

``conf/generate.yaml`` lets the engines compute in the checkpoint's own dtype, ``${dtype_of:${model.path}}``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcore_rl.config.bounds import AnyData, CrossCheck, OutputFile, PositiveInt, Seed, check
from mcore_rl.config.data import DataConfig, ImagesConfig, Truncation, image_violations
from mcore_rl.config.engine import Precision
from mcore_rl.config.files import place_of
from mcore_rl.config.lora import PublishedLora
from mcore_rl.config.reward import CodeConfig
from mcore_rl.config.rollout import RolloutConfig, ValidationConfig, rollout_config_violations, routing_violations
from mcore_rl.config.trainer import PolicyModelConfig, RayInitConfig
from mcore_rl.ground.errors import ConfigError, Violation

MAX_CONFIG_BYTES = 8 << 20


@dataclass(kw_only=True)
class GenerateDataConfig(ImagesConfig):
    """Files of prompts.

    files: as ``train_files`` there, but of data with splits the file or folder.
    max_samples: take only so many rows, the first of a shuffle by ``seed``, kept in file order; None is all.
    max_prompt_length, max_response_length: the most tokens of a prompt, and after it.
    prompt_key: the column of the messages.
    filter_overlong_prompts: leave out prompts that are too long; ``truncation`` then never applies.
    truncation: how prompts that are too long are treated otherwise.
    seed: of the choice of ``max_samples``.
    chat_template_kwargs: given to the tokenizer's chat template.
    """

    files: list[AnyData] = field(default_factory=list)
    max_samples: PositiveInt | None = None
    max_prompt_length: PositiveInt = 512
    max_response_length: PositiveInt = 512
    prompt_key: str = "prompt"
    filter_overlong_prompts: bool = False
    truncation: Truncation = Truncation.error
    seed: Seed = 1
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def prompts(self) -> DataConfig:
        """The same settings as the ``DataConfig`` with which training reads prompts."""
        return DataConfig(
            max_prompt_length=self.max_prompt_length,
            max_response_length=self.max_response_length,
            prompt_key=self.prompt_key,
            filter_overlong_prompts=self.filter_overlong_prompts,
            truncation=self.truncation,
            seed=self.seed,
            chat_template_kwargs=self.chat_template_kwargs,
            image_key=self.image_key,
            image_min_pixels=self.image_min_pixels,
            image_max_pixels=self.image_max_pixels,
            max_images=self.max_images,
        )


@dataclass(kw_only=True)
class GenerateRewardConfig:
    """What agents need of training's group ``reward``: ``code``, the limits of the tool ``python``."""

    code: CodeConfig = field(default_factory=CodeConfig)


@dataclass(kw_only=True)
class GenerateConfig:
    """All settings of ``mcore-rl generate``.

    rollout: the engines, which need not share their devices, and how they sample ``n`` responses to each prompt.
        ``rollout.dtype``, if none is written, is the checkpoint's (``dtype_of``).
    reward: the limits of the tool ``python``; nothing is graded.
    out: the parquet file to write; the engines' logs are written beside it.
    overwrite: whether ``out`` may be replaced.
    """

    model: PolicyModelConfig = field(default_factory=PolicyModelConfig)
    data: GenerateDataConfig = field(default_factory=GenerateDataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: GenerateRewardConfig = field(default_factory=GenerateRewardConfig)
    out: OutputFile = ""
    overwrite: bool = False
    ray_init: RayInitConfig = field(default_factory=RayInitConfig)


def dtype_of(path: str) -> str:
    """The dtype that the ``config.json`` of the checkpoint at ``path`` names, if engines compute in it; else bfloat16.

    What is wrong with the checkpoint is said elsewhere.
    """
    from mcore_rl.config.hub_files import config_folder
    from mcore_rl.config.yaml_files import read_limited  # with hydra, which no help needs

    try:
        values = json.loads(read_limited(config_folder(path) / "config.json", MAX_CONFIG_BYTES))
        stored = values.get("dtype") or values.get("torch_dtype")  # transformers 5; older ones
    except (ConfigError, ValueError, AttributeError, RuntimeError):
        stored = None
    return stored if isinstance(stored, str) and stored in Precision.__members__ else Precision.bfloat16.value


def generate_violations(config: GenerateConfig) -> list[Violation]:
    """Every violation that can be seen without opening a file; whether ``out`` is there is among them."""
    return check(config, [*DRAWING, _model_violations, _name_violations, _missing, _out_violations])


def sample_violations(config: GenerateConfig) -> list[Violation]:
    """Every violation of ``mcore-rl sample``, which draws as ``generate`` does and has no file of rows."""
    return check(config, [*DRAWING, _model_violations, _unread_violations])


def _lora_violations(config: GenerateConfig) -> Iterator[Violation]:
    if config.rollout.lora is PublishedLora.adapter:
        remedy = "Leave it out; mcore-rl convert merge makes a model of one and its adapters"
        yield Violation("rollout.lora", config.rollout.lora.value, "nothing trains adapters here", remedy)


def _length_violations(config: GenerateConfig) -> Iterator[Violation]:
    for name in ("max_prompt_length", "max_response_length"):
        here = getattr(config.data, name)
        there = getattr(config.rollout, name)
        if here != there:
            problem = f"differs from data.{name}={here}"
            yield Violation(f"rollout.{name}", there, problem, f"Leave it out: it is data.{name}")


def _validation_violations(config: GenerateConfig) -> Iterator[Violation]:
    if config.rollout.val_kwargs != ValidationConfig():
        problem = "says how training validates, and nothing is validated here"
        remedy = "Write rollout.n, rollout.temperature, rollout.top_p and rollout.top_k"
        yield Violation("rollout.val_kwargs", "...", problem, remedy)


def _partial_violations(config: GenerateConfig) -> Iterator[Violation]:
    usual = RolloutConfig()
    for name in ("partial", "over_sampling"):
        value = getattr(config.rollout, name)
        if value != getattr(usual, name):
            problem = "says what a training step leaves to later ones, and every response is waited for here"
            yield Violation(f"rollout.{name}", value, problem, "Leave it out")


def _model_violations(config: GenerateConfig) -> Iterator[Violation]:
    if not config.model.path:
        yield Violation("model.path", "", "is not set", "Write model.path=DIR, a Hugging Face checkpoint")


def _unread_violations(config: GenerateConfig) -> Iterator[Violation]:
    """What only rows of a file have a use for."""
    usual = GenerateConfig()
    rows = (
        ("data.files", config.data.files, usual.data.files),
        ("data.max_samples", config.data.max_samples, usual.data.max_samples),
        ("data.image_key", config.data.image_key, usual.data.image_key),
        ("rollout.agent", config.rollout.agent, usual.rollout.agent),
        ("out", config.out, usual.out),
        ("overwrite", config.overwrite, usual.overwrite),
    )
    for key, value, default in rows:
        if value != default:
            remedy = "Leave it out, or write mcore-rl generate, which answers the rows of files"
            yield Violation(key, value if isinstance(value, (str, int, list)) else "...", "is not read here", remedy)


# What holds of every command that draws responses and trains nothing.
DRAWING: list[CrossCheck[GenerateConfig]] = [
    lambda config: rollout_config_violations(config.rollout),
    lambda config: routing_violations(config.rollout, "false"),
    lambda config: image_violations(config.data),
    _lora_violations,
    _length_violations,
    _validation_violations,
    _partial_violations,
]


def _name_violations(config: GenerateConfig) -> Iterator[Violation]:
    if config.out and Path(config.out).suffix not in ("", ".parquet"):
        yield Violation("out", config.out, "is written as parquet", "Write a name that ends in .parquet")


def _missing(config: GenerateConfig) -> Iterator[Violation]:
    if not config.data.files:
        yield Violation("data.files", "[]", "there are no prompts", "Write data.files=[FILE]")
    if not config.out:
        yield Violation("out", "", "is not set", "Write out=FILE.parquet")


def _out_violations(config: GenerateConfig) -> Iterator[Violation]:
    out = place_of(config.out)
    if config.out and out in map(place_of, config.data.files):
        yield Violation("out", config.out, "is one of data.files", "Write another name")
    elif config.out and os.path.isfile(out) and not config.overwrite:
        yield Violation("out", config.out, "exists", "Write another name, or overwrite=true")
