"""The table of graders by ``data_source``, with the names that data sets write there."""

from __future__ import annotations

from collections.abc import Callable

from mcore_rl.config.reward import RewardConfig
from mcore_rl.ground.errors import ConfigError, Violation
from mcore_rl.rewards.arithmetic import grade_arithmetic
from mcore_rl.rewards.code import grade_code
from mcore_rl.rewards.geo3k import grade_geo3k
from mcore_rl.rewards.gsm8k import grade_gsm8k
from mcore_rl.rewards.math import grade_math
from mcore_rl.rewards.score import RewardRequest, Score
from mcore_rl.rewards.xml_reasoning import grade_xml

Grader = Callable[[RewardRequest, RewardConfig], Score]

NAMES: dict[Grader, tuple[str, ...]] = {
    # word problems with "#### number"
    grade_gsm8k: ("openai/gsm8k", "gsm8k", "products", "squares"),
    grade_arithmetic: ("arithmetic",),
    # mathematics, compared as expressions
    grade_math: (
        "lighteval/MATH",
        "DigitalLearningGmbH/MATH-lighteval",
        "HuggingFaceH4/MATH-500",
        "math",
        "math_dapo",
        "math_dapo_reasoning",
        "BytedTsinghua-SIA/DAPO-Math-17k",
        "aime24",
        "aime25",
        "aime2024",
        "aime2025",
        "HuggingFaceH4/aime_2024",
        "Maxwell-Jia/AIME_2024",
        "numina_aops_forum",
        "numina_synthetic_math",
        "numina_amc_aime",
        "numina_synthetic_amc",
        "numina_cn_k12",
        "numina_olympiads",
    ),
    # a box behind a thought
    grade_geo3k: ("hiyouga/geometry3k",),
    # <reasoning> and <answer>
    grade_xml: ("xml", "gsm8k_xml", "arithmetic_xml"),
    # programs with test cases
    grade_code: ("code", "taco", "apps", "codecontests", "codeforces", "mbpp", "humaneval"),
}
GRADERS: dict[str, Grader] = {name: grader for grader, names in NAMES.items() for name in names}


def grader_of(data_source: str) -> Grader:
    """The grader of ``data_source``.  ConfigError, with the known ones, if there is none."""
    if data_source not in GRADERS:
        known = ", ".join(GRADERS)
        problem = f"no grader is known for it; known are {known}"
        remedy = "Correct the column, or set custom_reward_function.path to a file with compute_score"
        raise ConfigError([Violation("data_source", data_source, problem, remedy)])
    return GRADERS[data_source]
