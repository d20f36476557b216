"""The configuration group ``reward_model``: a sequence classifier on vLLM engines of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from mcore_rl.config.bounds import PositiveInt, check
from mcore_rl.config.data import Truncation
from mcore_rl.config.judge import JudgeConfig
from mcore_rl.config.reward import CustomRewardFunction, Style
from mcore_rl.config.rollout import MemoryShare, ServingConfig
from mcore_rl.config.trainer import ModelPathConfig
from mcore_rl.config.vllm_fields import VLLM_FIELDS
from mcore_rl.ground.errors import Violation


class RewardTransform(Enum):
    """What becomes of a reward model's score; docs/rewards.md has the formulas."""

    none = "none"
    sigmoid = "sigmoid"


@dataclass(kw_only=True)
class RewardModelConfig(ServingConfig):
    """The reward model, which scores rows whose ``reward_model.style`` is ``model``.  Its weights never change.

    enable: whether there is one.
    model: the classifier; ``tokenizer_path`` names the chat template of the conversation, None is the classifier's own.
    max_length: the most tokens of a conversation in that template; None is the longest prompt plus the longest
    response, if those are known.
    truncation: how longer conversations are treated; ``error`` gives them ``reward.error_score`` and counts them.
    transform: what the reward is of the score: ``none`` is the score itself, ``sigmoid`` its logistic function, from
    0 to 1, so that no score counts much more than another on the same side (arXiv:2502.18770).
    The other fields are those of its ``dp`` engines, as in ``rollout``.
    """

    enable: bool = False
    model: ModelPathConfig = field(default_factory=ModelPathConfig)
    max_length: PositiveInt | None = None
    truncation: Truncation = Truncation.error
    transform: RewardTransform = RewardTransform.none
    gpu_memory_utilization: MemoryShare = 0.2

    @property
    def max_model_len(self) -> int:
        """``max_length``.  It must not be None any more: the start of a run fills it in."""
        assert self.max_length is not None
        return self.max_length


def reward_model_violations(config: RewardModelConfig) -> list[Violation]:
    """Every violation within ``config``; of its rules, none if it is not enabled."""
    return check(config, [_model_violations, _engine_violations], "reward_model.")


def _model_violations(config: RewardModelConfig) -> list[Violation]:
    if not config.enable or config.model.path:
        return []
    remedy = "Write reward_model.model.path=DIR, a Hugging Face sequence classifier, or reward_model.enable=false"
    return [Violation("reward_model.model.path", "", "is not set", remedy)]


def _engine_violations(config: RewardModelConfig) -> list[Violation]:
    return VLLM_FIELDS.violations(config.engine, "reward_model.engine") if config.enable else []


def style_violations(
    config: RewardModelConfig, judge: JudgeConfig, custom: CustomRewardFunction, ids: Mapping[Style, Sequence[str]]
) -> list[Violation]:
    """Refuses a reward model or a judge that no row asks for, and rows that nobody scores.  ids: rows of each style."""
    violations = list[Violation]()
    own = custom.path is not None
    asked = "reward_model.enable=true reward_model.model.path=DIR"
    violations += _unmatched(Style.model, ids, "reward_model.enable", config.enable, config.enable, own, asked)
    asked = "reward.judge.address=URL reward.judge.model=NAME, or reward.judge.path=DIR"
    key = judge.key or "reward.judge.address"
    value = judge.path or judge.address
    return violations + _unmatched(Style.judge, ids, key, value, judge.key is not None, own, asked)


def _unmatched(
    style: Style, ids: Mapping[Style, Sequence[str]], key: str, value: object, there: bool, own: bool, asked: str
) -> list[Violation]:
    """there: who scores rows of ``style``, as ``key`` says.  own: there is a function of the user's.  asked: for it."""
    rows = ids.get(style, ())
    if there and not rows:
        problem = f"no row asks for it: reward_model.style is {style.value} in none"
        remedy = f"Write the style {style.value} into the rows that it shall score, or leave {key} out"
        return [Violation(key, value, problem, remedy)]
    if rows and not there and not own:
        problem = f"reward_model.style is {style.value} in {len(rows)} rows, and nobody scores them; {rows[0]} is the"
        remedy = f"Write {asked}, name a custom_reward_function.path, or give them the style rule, for a grader"
        return [Violation(key, value, f"{problem} first", remedy)]
    return []
