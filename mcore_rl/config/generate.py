"""One run of ``mcore-rl generate``, whole: prompts in, responses out, no training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mcore_rl.config.data import DataConfig, Truncation, data_violations
from mcore_rl.config.rollout import RolloutConfig, ValidationConfig, rollout_config_violations, routing_violations
from mcore_rl.config.trainer import ModelPathConfig, RayInitConfig
from mcore_rl.errors import Violation


@dataclass(kw_only=True)
class GenerateDataConfig:
    """Parquet files of prompts; what is not said here is as in ``DataConfig``.

    files: in this order.  max_samples: only so many rows, the first of a shuffle by ``seed``, in file order; None is
    all.  max_prompt_length, max_response_length: tokens, as of ``RolloutConfig``.
    """

    files: list[str] = field(default_factory=list)
    max_samples: int | None = None
    max_prompt_length: int = 512
    max_response_length: int = 512
    prompt_key: str = "prompt"
    filter_overlong_prompts: bool = False
    truncation: Truncation = Truncation.error
    seed: int = 1
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def prompts(self) -> DataConfig:
        """The same, as training reads its prompts."""
        return DataConfig(
            max_prompt_length=self.max_prompt_length,
            max_response_length=self.max_response_length,
            prompt_key=self.prompt_key,
            filter_overlong_prompts=self.filter_overlong_prompts,
            truncation=self.truncation,
            seed=self.seed,
            chat_template_kwargs=self.chat_template_kwargs,
        )


@dataclass(kw_only=True)
class GenerateConfig:
    """What ``mcore-rl generate`` runs.

    rollout: ``n`` responses to each prompt, drawn as its ``temperature``, ``top_p``, ``top_k`` and ``seed`` say; the
    engines have their devices to themselves.  out: the parquet file that is written; the engines' logs stand beside it.
    overwrite: a file of that name may be replaced.
    """

    model: ModelPathConfig = field(default_factory=ModelPathConfig)
    data: GenerateDataConfig = field(default_factory=GenerateDataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    out: str = ""
    overwrite: bool = False
    ray_init: RayInitConfig = field(default_factory=RayInitConfig)


def generate_violations(config: GenerateConfig) -> list[Violation]:
    """Everything wrong in ``config`` that can be told without opening a file."""
    found = [
        *data_violations(config.data.prompts),
        *rollout_config_violations(config.rollout),
        *routing_violations(config.rollout),
    ]
    if config.data.max_samples is not None and config.data.max_samples < 1:
        found.append(Violation("data.max_samples", config.data.max_samples, "must be positive", "Write 1 or more"))
    for name in ("max_prompt_length", "max_response_length"):
        here, there = getattr(config.data, name), getattr(config.rollout, name)
        if here != there:
            problem = f"differs from data.{name}={here}"
            found.append(Violation(f"rollout.{name}", there, problem, f"Leave it out: it is data.{name}"))
    if config.rollout.val_kwargs != ValidationConfig():
        problem = "says how training validates, and nothing is validated here"
        remedy = "Write rollout.n, rollout.temperature, rollout.top_p and rollout.top_k"
        found.append(Violation("rollout.val_kwargs", "...", problem, remedy))
    if not config.model.path:
        found.append(Violation("model.path", "", "is not set", "Write model.path=DIR, a Hugging Face checkpoint"))
    if not config.data.files:
        found.append(Violation("data.files", "[]", "there are no prompts", "Write data.files=[FILE]"))
    if not config.out:
        found.append(Violation("out", "", "is not set", "Write out=FILE.parquet"))
    return found
