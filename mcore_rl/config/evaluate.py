"""The configuration of ``mcore-rl evaluate``, which grades responses that were generated before."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from mcore_rl.config.bounds import CrossCheck, InputFile, OutputFile, PositiveInt, check
from mcore_rl.config.files import place_of
from mcore_rl.config.judge import judge_violations
from mcore_rl.config.reward import CustomRewardFunction, RewardConfig, custom_violations
from mcore_rl.config.reward_model import RewardModelConfig, reward_model_violations
from mcore_rl.config.trainer import RayInitConfig
from mcore_rl.ground.errors import Violation


@dataclass(kw_only=True)
class EvaluateConfig:
    """All settings of ``mcore-rl evaluate``.

    path: a parquet file with responses, as ``mcore-rl generate`` writes it.
    response_key: the column of responses: a list of texts, or one text.
    prompt_key: the column of the messages.
    k: the values of k in pass@k and maj@k; empty is 1, 2, 4, ... and the number of responses.
    max_response_length: the limit with which the responses were generated; only ``reward.overlong`` needs it.
    out: the JSON file to write the numbers to; None writes none.
    pairs: the parquet file to write pairs of a better and a worse response to, which ``mcore-rl prefer`` and
        ``mcore-rl reward`` train on; None writes none.
    overwrite: whether ``out`` and ``pairs`` may be replaced.
    ray_init: the Ray that the engines of ``reward_model`` run in; unused unless that is enabled.
    """

    path: InputFile = ""
    response_key: str = "responses"
    prompt_key: str = "prompt"
    k: list[PositiveInt] = field(default_factory=list)
    max_response_length: PositiveInt | None = None
    reward: RewardConfig = field(default_factory=RewardConfig)
    custom_reward_function: CustomRewardFunction = field(default_factory=CustomRewardFunction)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    ray_init: RayInitConfig = field(default_factory=RayInitConfig)
    out: OutputFile | None = None
    pairs: OutputFile | None = None
    overwrite: bool = False


def evaluate_violations(config: EvaluateConfig) -> list[Violation]:
    """Every violation that can be seen without opening a file; whether ``out`` is there is among them."""
    rules: list[CrossCheck[EvaluateConfig]] = [
        lambda config: custom_violations(config.custom_reward_function),
        lambda config: reward_model_violations(config.reward_model),
        lambda config: judge_violations(config.reward.judge),
        _judge_violations,
        _reward_model_violations,
        _path_violations,
        _k_violations,
        _overlong_violations,
        _out_violations,
    ]
    return check(config, rules)


def _judge_violations(config: EvaluateConfig) -> list[Violation]:
    if config.reward.judge.path is None:
        return []
    problem = "is served by mcore-rl train alone: an evaluation starts no engines of a judge"
    remedy = "Serve it (vllm serve), and write reward.judge.address=URL reward.judge.model=NAME"
    return [Violation("reward.judge.path", config.reward.judge.path, problem, remedy)]


def _reward_model_violations(config: EvaluateConfig) -> list[Violation]:
    if not config.reward_model.enable or config.reward_model.max_length is not None:
        return []
    remedy = "Write reward_model.max_length=TOKENS, of the longest conversation"
    return [Violation("reward_model.max_length", None, "is not set", remedy)]


def _path_violations(config: EvaluateConfig) -> list[Violation]:
    if config.path:
        return []
    return [Violation("path", "", "is not set", "Write path=FILE.parquet, as mcore-rl generate writes it")]


def _k_violations(config: EvaluateConfig) -> list[Violation]:
    if len(set(config.k)) == len(config.k):
        return []
    return [Violation("k", config.k, "names a number twice", "Name it once")]


def _overlong_violations(config: EvaluateConfig) -> list[Violation]:
    if not config.reward.overlong.enable or config.max_response_length is not None:
        return []
    problem = "how long a response is too long follows from max_response_length, which is not set"
    remedy = "Write max_response_length=TOKENS, as it was when they were generated, or enable=false"
    return [Violation("reward.overlong.enable", True, problem, remedy)]


def _out_violations(config: EvaluateConfig) -> Iterator[Violation]:
    for name, path in (("out", config.out), ("pairs", config.pairs)):
        if path is None:
            continue
        if place_of(path) == place_of(config.path):
            yield Violation(name, path, "is the file with the responses", "Write another name")
        elif os.path.isfile(place_of(path)) and not config.overwrite:
            yield Violation(name, path, "exists", "Write another name, or overwrite=true")
    if config.out is not None and config.pairs is not None and place_of(config.out) == place_of(config.pairs):
        yield Violation("pairs", config.pairs, "is the file of the numbers, too", "Write another name")
