"""What is refused of ``mcore-rl evaluate`` before a file is opened."""

from __future__ import annotations

import pytest

from mcore_rl.config.compose import compose
from mcore_rl.config.evaluate import EvaluateConfig, evaluate_violations


def refusals(*overrides: str) -> list[str]:
    config = compose(EvaluateConfig, "evaluate", overrides)
    return [str(violation) for violation in evaluate_violations(config)]


def test_a_path_is_enough() -> None:
    assert refusals("path=r.parquet") == []
    assert refusals("path=r.parquet", "k=[1,8]", "reward.overlong.enable=true", "max_response_length=64") == []


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("path=", "path=: is not set. Write path=FILE.parquet"),
        ("k=[4,0]", "k[1]=0: must be positive"),
        ("k=[2,2]", "k=[2, 2]: names a number twice"),
        ("max_response_length=0", "max_response_length=0: must be positive"),
        ("reward.overlong.enable=true", "reward.overlong.enable=True: how long a response is too long"),
        ("reward_model.enable=true reward_model.max_length=9", "reward_model.model.path=: is not set"),
        ("reward_model.enable=true reward_model.model.path=m", "reward_model.max_length=None: is not set"),
        ("reward.timeout_s=0", "reward.timeout_s=0.0: must be at least 0.001"),
    ],
)
def test_what_cannot_be_is_refused(override: str, said: str) -> None:
    messages = refusals("path=r.parquet", *override.split())
    assert len(messages) == 1 and messages[0].startswith(said), messages


def test_all_of_it_is_said_at_once() -> None:
    assert len(refusals("k=[-1]", "max_response_length=-1", "reward.code.memory_mib=0")) == 4
