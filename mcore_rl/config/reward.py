"""Rewards as a user writes them: how known data sources are graded, limits of grading, and a function of one's own."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from mcore_rl.errors import Violation


class AnswerMethod(Enum):
    """``strict`` wants the answer after ``####``; ``flexible`` takes the last number of the response."""

    strict = "strict"
    flexible = "flexible"


@dataclass(kw_only=True)
class Gsm8kConfig:
    """``#### number`` answers.  score: of the right one.  format_score: of a wrong one in the right form."""

    method: AnswerMethod = AnswerMethod.strict
    score: float = 1.0
    format_score: float = 0.0


@dataclass(kw_only=True)
class XmlConfig:
    """``<reasoning>`` and ``<answer>`` tags: the weight of each part of the score."""

    correctness: float = 2.0
    integer: float = 0.5
    strict_format: float = 0.5
    soft_format: float = 0.5
    tag_count: float = 0.5


@dataclass(kw_only=True)
class CodeConfig:
    """Programs run against test cases, each in a subprocess of its own.

    timeout_s, memory_mib, output_kib: of one test case.  A program may start no process.  continuous: the share of test
    cases that pass; False: 1 when all do, else 0.  allow_weak_confinement: run programs also where the kernel lacks
    Landlock or seccomp, and nothing but Python's own checks keeps them from files, processes and the network.
    """

    timeout_s: float = 6.0
    memory_mib: int = 512
    output_kib: int = 64
    continuous: bool = False
    allow_weak_confinement: bool = False


@dataclass(kw_only=True)
class OverlongConfig:
    """Soft overlong punishment (arXiv:2503.14476, eq. 13) in the last ``length`` tokens before the limit.

    penalty_factor: what a response that reaches the limit loses.
    """

    enable: bool = False
    length: int = 256
    penalty_factor: float = 1.0


@dataclass(kw_only=True)
class CustomRewardFunction:
    """``compute_score(data_source, solution_str, ground_truth, extra_info)`` of a Python file, float or dict.

    path: of the file; None: known data sources are graded by their own graders.  name: of the function.  env: names of
    environment variables that it is to have although they look like secrets, as the key of a judge's API does.
    """

    path: str | None = None
    name: str = "compute_score"
    env: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class RewardConfig:
    """Grading of responses.

    num_workers: processes; None is one for each core, at most 16.  timeout_s: of one response.  error_score: of a
    response whose grader raised, hung or gave no number.
    """

    num_workers: int | None = None
    timeout_s: float = 30.0
    error_score: float = 0.0
    gsm8k: Gsm8kConfig = field(default_factory=Gsm8kConfig)
    xml: XmlConfig = field(default_factory=XmlConfig)
    code: CodeConfig = field(default_factory=CodeConfig)
    overlong: OverlongConfig = field(default_factory=OverlongConfig)


def reward_violations(reward: RewardConfig) -> list[Violation]:
    """Everything wrong in ``reward`` by itself."""
    positive = {
        "num_workers": reward.num_workers,
        "timeout_s": reward.timeout_s,
        "code.timeout_s": reward.code.timeout_s,
        "code.memory_mib": reward.code.memory_mib,
        "code.output_kib": reward.code.output_kib,
        "overlong.length": reward.overlong.length,
    }
    found = [
        Violation(f"reward.{key}", value, "must be positive", "Write more than 0")
        for key, value in positive.items()
        if value is not None and value <= 0
    ]
    if reward.overlong.penalty_factor < 0:
        value = reward.overlong.penalty_factor
        found.append(Violation("reward.overlong.penalty_factor", value, "would reward length", "Write 0 or more"))
    return found
