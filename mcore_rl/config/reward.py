"""The configuration groups ``reward`` and ``custom_reward_function``: graders, their limits, the user's function."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any

from mcore_rl.config.bounds import InputFile, Interval, NonNegativeFloat, PositiveInt, Seconds
from mcore_rl.config.judge import JudgeConfig
from mcore_rl.ground.errors import Violation


class Style(Enum):
    """Who scores a row, by its ``reward_model.style``.

    ``rule``: a grader, or a function of the user's.  ``model``: the reward model.  ``judge``: the judge.
    """

    rule = "rule"
    model = "model"
    judge = "judge"


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


class XmlCompatibility(Enum):
    """Whose reading of ``<reasoning>`` and ``<answer>`` grades.

    ``none``: ours.  ``grpo_demo``: that of the published GRPO course, whose forms end where a line ends.
    ``grpo_demo_dotall``: that of its later version, whose forms go over lines.
    """

    none = "none"
    grpo_demo = "grpo_demo"
    grpo_demo_dotall = "grpo_demo_dotall"


@dataclass(kw_only=True)
class XmlConfig:
    """``<reasoning>`` and ``<answer>`` tags: the weight of each part of the score, and whose reading it is.

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
    compatibility: XmlCompatibility = XmlCompatibility.none


@dataclass(kw_only=True)
class CodeConfig:
    """Grading of programs by test cases; each case runs in a subprocess, which may start no other process.

    timeout_s, memory_mib, output_kib: limits of one test case.
    continuous: the score is the share of test cases that pass; False: 1 if all pass, else 0.
    first_cases: the share is of the first so many (10 in PRIME's code), after which no case runs once one has failed;
    None is all.
    allow_weak_confinement: run programs even if the kernel lacks Landlock or seccomp, so that only Python's own checks
    keep them from files, processes and the network: for programs that you trust.
    allow_inside_judging: use rows whose tests only run in the program's own process, where a program could forge its
    verdict; docs/rewards.md says which.
    """

    timeout_s: Seconds = 6.0
    memory_mib: Annotated[int, Interval("[32, 1048576]")] = 512
    output_kib: PositiveInt = 64
    continuous: bool = False
    first_cases: PositiveInt | None = None
    allow_weak_confinement: bool = False
    allow_inside_judging: bool = False


PUBLISHED_SHARE = 5  # 20,480 / 4,096 (arXiv:2503.14476, section 4.1)


@dataclass(kw_only=True)
class OverlongConfig:
    """Soft overlong punishment (arXiv:2503.14476, eq. 13) in the last ``length`` tokens before the limit.

    enable: whether long responses are punished.
    length: tokens before the limit in which the punishment grows, from 0 to ``penalty_factor``; None is a fifth of the
    limit, as in the paper: 4,096 of 20,480.
    penalty_factor: the score that a response at the limit loses.
    """

    enable: bool = False
    length: PositiveInt | None = None
    penalty_factor: NonNegativeFloat = 1.0

    def tokens(self, limit: int) -> int:
        """The tokens before ``limit`` in which the punishment grows."""
        return max(1, limit // PUBLISHED_SHARE) if self.length is None else self.length


class Completions(Enum):
    """How functions of TRL's signature see prompts and completions.

    ``messages``: as lists of {role, content}, as TRL gives conversations.  ``text``: as texts.
    """

    messages = "messages"
    text = "text"


@dataclass(kw_only=True)
class CustomRewardFunction:
    """A user's ``compute_score(data_source, solution_str, ground_truth, extra_info)``, which returns a float or a dict.

    Or a function of TRL's signature, ``f(prompts, completions, **columns)``, which returns a list.

    path: its Python file; None: each known data source has its built-in grader.
    name: the function's name.
    functions: instead of ``name``, those of several functions; the reward is the sum of theirs.
    weights: a factor for each of ``functions``; None: 1.
    completions: what functions of TRL's signature are given.
    reward_kwargs: further arguments, by name, for every function that takes them; yaml says what their values are.
    env: environment variables that it receives although their names look like secrets, such as a judge's API key.
    import_timeout_s: limit for importing the file, in each grading process.
    """

    path: InputFile | None = None
    name: str = "compute_score"
    functions: list[str] = field(default_factory=list)
    weights: list[float] | None = None
    completions: Completions = Completions.messages
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    env: list[str] = field(default_factory=list)
    import_timeout_s: Seconds = 30.0

    @property
    def weighted(self) -> dict[str, float]:
        """Name -> weight of each of ``functions``."""
        weights = [1.0] * len(self.functions) if self.weights is None else self.weights
        return dict(zip(self.functions, weights, strict=True))


@dataclass(kw_only=True)
class RewardConfig:
    """Grading of responses.

    num_workers: grading processes; None is one per core, at most 16.  timeout_s: limit for one response.
    error_score: the score of a response whose grader raised, hung or gave no number.
    answer_after: the text that ends a thought, such as ``</think>``: built-in graders see what follows its last place,
    and nothing of a response without it; None: they see all, an answer in an unfinished thought too.
    """

    num_workers: Annotated[int, Interval("[1, 65536]")] | None = None
    timeout_s: Seconds = 30.0
    error_score: float = 0.0
    answer_after: str | None = None
    gsm8k: Gsm8kConfig = field(default_factory=Gsm8kConfig)
    math: MathConfig = field(default_factory=MathConfig)
    xml: XmlConfig = field(default_factory=XmlConfig)
    code: CodeConfig = field(default_factory=CodeConfig)
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)


def custom_violations(custom: CustomRewardFunction) -> Iterator[Violation]:
    """The contradictions between settings of ``custom``."""
    prefix = "custom_reward_function."
    functions = custom.functions
    weights = custom.weights
    if functions and custom.path is None:
        yield Violation(f"{prefix}path", None, "is not set, and functions are named", "Write the file that has them")
    if custom.reward_kwargs and custom.path is None:
        problem = "is for a function of one's own, and none is named"
        yield Violation(f"{prefix}reward_kwargs", custom.reward_kwargs, problem, f"Write {prefix}path=FILE.py")
    if twice := sorted({name for name in functions if functions.count(name) > 1}):
        problem = f"names {', '.join(twice)} more than once"
        yield Violation(f"{prefix}functions", functions, problem, "Name each once, and give it a weight")
    if weights is not None and len(weights) != len(functions):
        problem = f"has {len(weights)} weights for {len(functions)} functions"
        yield Violation(f"{prefix}weights", weights, problem, "Write one for each of functions, or none")
