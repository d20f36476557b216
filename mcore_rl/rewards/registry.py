"""The table of graders by ``data_source``, with the names that data sets write there."""

from __future__ import annotations

from collections.abc import Callable

from mcore_rl.config.reward import RewardConfig
from mcore_rl.errors import ConfigError, Violation
from mcore_rl.rewards.arithmetic import grade_arithmetic
from mcore_rl.rewards.code import grade_code
from mcore_rl.rewards.geo3k import grade_geo3k
from mcore_rl.rewards.gsm8k import grade_gsm8k
from mcore_rl.rewards.math import grade_math
from mcore_rl.rewards.score import RewardRequest, Score
from mcore_rl.rewards.xml_reasoning import grade_xml

Grader = Callable[[RewardRequest, RewardConfig], Score]

GRADERS: dict[str, Grader] = {
    # word problems with "#### number"
    "openai/gsm8k": grade_gsm8k,
    "gsm8k": grade_gsm8k,
    "products": grade_gsm8k,
    "squares": grade_gsm8k,
    "arithmetic": grade_arithmetic,
    # mathematics, compared as expressions
    "lighteval/MATH": grade_math,
    "DigitalLearningGmbH/MATH-lighteval": grade_math,
    "HuggingFaceH4/MATH-500": grade_math,
    "math": grade_math,
    "math_dapo": grade_math,
    "math_dapo_reasoning": grade_math,
    "BytedTsinghua-SIA/DAPO-Math-17k": grade_math,
    "aime24": grade_math,
    "aime25": grade_math,
    "aime2024": grade_math,
    "aime2025": grade_math,
    "HuggingFaceH4/aime_2024": grade_math,
    "Maxwell-Jia/AIME_2024": grade_math,
    "numina_aops_forum": grade_math,
    "numina_synthetic_math": grade_math,
    "numina_amc_aime": grade_math,
    "numina_synthetic_amc": grade_math,
    "numina_cn_k12": grade_math,
    "numina_olympiads": grade_math,
    # a box behind a thought
    "hiyouga/geometry3k": grade_geo3k,
    # <reasoning> and <answer>
    "xml": grade_xml,
    "gsm8k_xml": grade_xml,
    "arithmetic_xml": grade_xml,
    # programs with test cases
    "code": grade_code,
    "taco": grade_code,
    "apps": grade_code,
    "codecontests": grade_code,
    "codeforces": grade_code,
    "mbpp": grade_code,
    "humaneval": grade_code,
}


def grader_of(data_source: str) -> Grader:
    """The grader of ``data_source``.  ConfigError, with the known ones, if there is none."""
    if data_source not in GRADERS:
        known = ", ".join(GRADERS)
        problem = f"no grader is known for it; known are {known}"
        remedy = "Correct the column, or set custom_reward_function.path to a file with compute_score"
        raise ConfigError([Violation("data_source", data_source, problem, remedy)])
    return GRADERS[data_source]
