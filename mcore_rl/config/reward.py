"""The configuration groups ``reward`` and ``custom_reward_function``: graders, their limits, the user's function."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated

from mcore_rl.config.bounds import InputFile, Interval, NonNegativeFloat, PositiveInt, Seconds, check
from mcore_rl.errors import Violation


class AnswerMethod(Enum):
    """``strict``: the answer must follow ``####``.  ``flexible``: the answer is the last number of the response."""

    strict = "strict"
    flexible = "flexible"


@dataclass(kw_only=True)
class Gsm8kConfig:
    """``#### number`` answers.  score: for a right answer.  format_score: for a wrong one in the right form."""

    method: AnswerMethod = AnswerMethod.strict
    score: float = 1.0
    format_score: float = 0.0


@dataclass(kw_only=True)
class MathConfig:
    """Mathematics by value.  percent: 75 is right for 75% and 75% for 75; False: only 75% and 0.75 are."""

    percent: bool = True


@dataclass(kw_only=True)
class XmlConfig:
    """``<reasoning>`` and ``<answer>`` tags: the weight of each part of the score.

    correctness: of the right answer.
    integer: of an answer that is a whole number.
    strict_format, soft_format: of the tags in their order, alone in the response; or somewhere in it.
    tag_count: of the share of tags that occur exactly once, less 0.001 for each character after the last.
    """

    correctness: float = 2.0
    integer: float = 0.5
    strict_format: float = 0.5
    soft_format: float = 0.5
    tag_count: float = 0.5


@dataclass(kw_only=True)
class CodeConfig:
    """Grading of programs by test cases; each case runs in a subprocess, which may start no other process.

    timeout_s, memory_mib, output_kib: limits of one test case.
    continuous: the score is the share of test cases that pass; False: 1 if all pass, else 0.
    allow_weak_confinement: run programs even if the kernel lacks Landlock or seccomp, so that only Python's own checks
    keep them from files, processes and the network: for programs that you trust.
    allow_inside_judging: use rows whose tests only run in the program's own process, where a program could forge its
    verdict; docs/rewards.md says which.
    """

    timeout_s: Seconds = 6.0
    memory_mib: PositiveInt = 512
    output_kib: PositiveInt = 64
    continuous: bool = False
    allow_weak_confinement: bool = False
    allow_inside_judging: bool = False


@dataclass(kw_only=True)
class OverlongConfig:
    """Soft overlong punishment (arXiv:2503.14476, eq. 13) in the last ``length`` tokens before the limit.

    enable: whether long responses are punished.
    length: tokens before the limit in which the punishment grows, from 0 to ``penalty_factor``.
    penalty_factor: the score that a response at the limit loses.
    """

    enable: bool = False
    length: PositiveInt = 256
    penalty_factor: NonNegativeFloat = 1.0


@dataclass(kw_only=True)
class CustomRewardFunction:
    """A user's ``compute_score(data_source, solution_str, ground_truth, extra_info)``, which returns a float or a dict.

    path: its Python file; None: each known data source has its built-in grader.
    name: the function's name.
    env: environment variables that it receives although their names look like secrets, such as a judge's API key.
    import_timeout_s: limit for importing the file, in each grading process.
    """

    path: InputFile | None = None
    name: str = "compute_score"
    env: list[str] = field(default_factory=list)
    import_timeout_s: Seconds = 30.0


@dataclass(kw_only=True)
class RewardConfig:
    """Grading of responses.

    num_workers: grading processes; None is one per core, at most 16.  timeout_s: limit for one response.
    error_score: the score of a response whose grader raised, hung or gave no number.
    """

    num_workers: Annotated[int, Interval("[1, 65536]")] | None = None
    timeout_s: Seconds = 30.0
    error_score: float = 0.0
    gsm8k: Gsm8kConfig = field(default_factory=Gsm8kConfig)
    math: MathConfig = field(default_factory=MathConfig)
    xml: XmlConfig = field(default_factory=XmlConfig)
    code: CodeConfig = field(default_factory=CodeConfig)
    overlong: OverlongConfig = field(default_factory=OverlongConfig)


def reward_violations(reward: RewardConfig) -> list[Violation]:
    """Every violation within ``reward``, not looking at other groups."""
    return check(reward, prefix="reward.")
