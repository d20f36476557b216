"""The configuration of ``mcore-rl evaluate``, which grades responses that were generated before."""

from __future__ import annotations

from dataclasses import dataclass, field

from mcore_rl.config.reward import CustomRewardFunction, RewardConfig, reward_violations
from mcore_rl.config.reward_model import RewardModelConfig, reward_model_violations
from mcore_rl.config.trainer import RayInitConfig
from mcore_rl.errors import Violation


@dataclass(kw_only=True)
class EvaluateConfig:
    """All settings of ``mcore-rl evaluate``.

    path: a parquet file with responses, as ``mcore-rl generate`` writes it.
    response_key: the column of responses: a list of texts, or one text.
    prompt_key: the column of the messages.
    k: the values of k in pass@k and maj@k; empty is 1, 2, 4, ... and the number of responses.
    max_response_length: the limit with which the responses were generated; only ``reward.overlong`` needs it.
    out: the JSON file to write the numbers to; None writes none.
    overwrite: whether ``out`` may be replaced.
    ray_init: the Ray that the engines of ``reward_model`` run in; unused unless that is enabled.
    """

    path: str = ""
    response_key: str = "responses"
    prompt_key: str = "prompt"
    k: list[int] = field(default_factory=list)
    max_response_length: int | None = None
    reward: RewardConfig = field(default_factory=RewardConfig)
    custom_reward_function: CustomRewardFunction = field(default_factory=CustomRewardFunction)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    ray_init: RayInitConfig = field(default_factory=RayInitConfig)
    out: str | None = None
    overwrite: bool = False


def evaluate_violations(config: EvaluateConfig) -> list[Violation]:
    """Every violation that can be seen without opening a file."""
    violations = [*reward_violations(config.reward), *reward_model_violations(config.reward_model)]
    if config.reward_model.enable and config.reward_model.max_length is None:
        remedy = "Write reward_model.max_length=TOKENS, of the longest conversation"
        violations.append(Violation("reward_model.max_length", None, "is not set", remedy))
    if not config.path:
        violations.append(
            Violation("path", "", "is not set", "Write path=FILE.parquet, as mcore-rl generate writes it")
        )
    wrong = [k for k in config.k if k < 1]
    if wrong:
        violations.append(
            Violation("k", config.k, f"{wrong[0]} is no number of responses", "Write 1 or more, as k=[1,8]")
        )
    if len(set(config.k)) < len(config.k):
        violations.append(Violation("k", config.k, "names a number twice", "Name it once"))
    longest = config.max_response_length
    if longest is not None and longest < 1:
        violations.append(Violation("max_response_length", longest, "must be positive", "Write 1 or more"))
    if config.reward.overlong.enable and longest is None:
        problem = "how long a response is too long follows from max_response_length, which is not set"
        remedy = "Write max_response_length=TOKENS, as it was when they were generated, or enable=false"
        violations.append(Violation("reward.overlong.enable", True, problem, remedy))
    return violations
