"""The reward model as a user writes it: a sequence classifier on engines of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mcore_rl.config.data import Truncation
from mcore_rl.config.reward import CustomRewardFunction
from mcore_rl.config.rollout import ServingConfig, serving_violations
from mcore_rl.config.trainer import ModelPathConfig
from mcore_rl.errors import Violation


@dataclass(kw_only=True)
class RewardModelConfig(ServingConfig):
    """What scores the rows whose ``reward_model.style`` is ``model``, if ``enable``; its weights never change.

    model: the classifier, and whose chat template the conversation is written in (``tokenizer_path``; None is the
    classifier's own).  max_length: tokens of a conversation in that template; None is the longest prompt with the
    longest response, where those are known.  truncation: of longer ones; ``error`` gives them no score, but
    ``reward.error_score`` and a count.  The rest: of its engines, ``dp`` of them, as ``rollout``'s.
    """

    enable: bool = False
    model: ModelPathConfig = field(default_factory=ModelPathConfig)
    max_length: int | None = None
    truncation: Truncation = Truncation.error
    gpu_memory_utilization: float = 0.2

    @property
    def max_model_len(self) -> int:
        """See ``max_length``, which is written out by now."""
        assert self.max_length is not None
        return self.max_length


def reward_model_violations(config: RewardModelConfig) -> list[Violation]:
    """Everything wrong in ``config`` by itself; nothing where it is not enabled."""
    if not config.enable:
        return []
    found = serving_violations(config, "reward_model")
    if not config.model.path:
        remedy = "Write reward_model.model.path=DIR, a Hugging Face sequence classifier, or reward_model.enable=false"
        found.append(Violation("reward_model.model.path", "", "is not set", remedy))
    if config.max_length is not None and config.max_length < 1:
        remedy = "Write 1 or more, or leave it out"
        found.append(Violation("reward_model.max_length", config.max_length, "must be positive", remedy))
    return found


def style_violations(config: RewardModelConfig, custom: CustomRewardFunction, ids: Sequence[str]) -> list[Violation]:
    """A reward model without rows, or rows without anybody who scores them.  ids: of rows of style ``model``."""
    if config.enable and not ids:
        problem = "no row asks for it: reward_model.style is model in none"
        remedy = "Write the style model into the rows that it shall score, or reward_model.enable=false"
        return [Violation("reward_model.enable", True, problem, remedy)]
    if ids and not config.enable and custom.path is None:
        problem = f"reward_model.style is model in {len(ids)} rows, and nobody scores them; {ids[0]} is the first"
        remedy = "Write reward_model.enable=true reward_model.model.path=DIR, name a custom_reward_function.path, or "
        return [Violation("reward_model.enable", False, problem, f"{remedy}give them the style rule, for a grader")]
    return []
