"""Soft overlong punishment: eq. 13 of DAPO by hand."""

from __future__ import annotations

import pytest

from mcore_rl.config.reward import OverlongConfig
from mcore_rl.rewards.overlong import overlong_penalty


@pytest.mark.parametrize(
    ("num_tokens", "penalty"),
    [(0, 0.0), (600, 0.0), (800, 0.0), (801, -0.0025), (850, -0.125), (900, -0.25), (1000, -0.5), (1001, -0.5)],
)
def test_the_line(num_tokens: int, penalty: float) -> None:
    config = OverlongConfig(enable=True, length=200, penalty_factor=0.5)
    assert overlong_penalty(num_tokens, 1000, config) == pytest.approx(penalty, abs=1e-15)


@pytest.mark.parametrize(("limit", "begins"), [(20480, 16384), (1000, 800), (4, 3)])
def test_a_fifth_of_the_limit_as_published(limit: int, begins: int) -> None:
    """The paper expects 16,384 tokens and punishes 4,096 more."""
    config = OverlongConfig(enable=True)
    assert overlong_penalty(begins, limit, config) == 0.0
    assert overlong_penalty(limit, limit, config) == -1.0
    middle = (begins + limit) // 2
    assert overlong_penalty(middle, limit, config) == pytest.approx(-(middle - begins) / (limit - begins))


def test_off_by_default() -> None:
    assert overlong_penalty(1000, 1000, OverlongConfig()) == 0.0
