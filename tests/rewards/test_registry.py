"""Data sources and their graders."""

from __future__ import annotations

import pytest

from mcore_rl.ground.errors import ConfigError
from mcore_rl.rewards.arithmetic import grade_arithmetic
from mcore_rl.rewards.code import grade_code
from mcore_rl.rewards.geo3k import grade_geo3k
from mcore_rl.rewards.gsm8k import grade_gsm8k
from mcore_rl.rewards.math import grade_math
from mcore_rl.rewards.registry import Grader, grader_of
from mcore_rl.rewards.xml_reasoning import grade_xml


@pytest.mark.parametrize(
    ("data_source", "grader"),
    [
        ("openai/gsm8k", grade_gsm8k),
        ("arithmetic", grade_arithmetic),
        ("lighteval/MATH", grade_math),
        ("math_dapo", grade_math),
        ("aime24", grade_math),
        ("xml", grade_xml),
        ("hiyouga/geometry3k", grade_geo3k),
        ("squares", grade_gsm8k),
        ("apps", grade_code),
        ("codecontests", grade_code),
    ],
)
def test_names_of_the_field(data_source: str, grader: Grader) -> None:
    assert grader_of(data_source) is grader


def test_an_unknown_source_is_named_with_what_is_known_and_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"data_source=my/data.*openai/gsm8k.*custom_reward_function\.path") as caught:
        grader_of("my/data")
    assert len(caught.value.violations) == 1
