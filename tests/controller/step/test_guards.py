"""Which runs raise an alarm, and which do not, on courses of metrics as runs have them."""

from __future__ import annotations

import math
import random

import pytest

from mcore_rl.config.trainer import GuardConfig, TrainerConfig, trainer_violations
from mcore_rl.controller.step.guards import Guards


def alarms(key: str, values: list[float], window: int = 4, **config: object) -> dict[int, str]:
    """Step -> what was said, of a run whose metric ``key`` went like that."""
    guards = Guards(GuardConfig(window=window, **config))  # type: ignore[arg-type]
    said = {step: guards.see({key: value}) for step, value in enumerate(values, 1)}
    assert all(len(each) <= 1 for each in said.values())
    return {step: each[0] for step, each in said.items() if each}


def noisy(means: list[float], spread: float, seed: int) -> list[float]:
    draw = random.Random(seed)
    return [mean + draw.gauss(0, spread) for mean in means]


def test_a_reward_that_falls_back_half_way_raises_one_alarm() -> None:
    rising = [0.1 * step for step in range(10)]
    (step,) = alarms("reward/mean", rising + [0.2] * 8)
    # Means of four at their best: 0.75, first 0.15; half of the gain is lost below 0.45: 0.8, 0.9, 0.2, 0.2 is 0.525,
    # 0.9 and three of 0.2 are 0.375.
    assert step == 13
    said = alarms("reward/mean", rising + [0.2] * 8)[13]
    assert said.startswith("the reward collapses: 0.75 at its best, 0.375 now (means of 4 steps)")
    assert not alarms("reward/mean", rising + [0.6] * 8), "a part of it may be lost"


@pytest.mark.parametrize("learns", [0.0, 0.003])
def test_noise_alone_is_no_collapse(learns: float) -> None:
    """Of 200 runs of a hundred steps whose rewards stand still, or rise."""
    means = [0.3 + learns * step for step in range(100)]
    assert sum(bool(alarms("reward/mean", noisy(means, 0.1, seed), GuardConfig().window)) for seed in range(200)) <= 2


def test_an_alarm_is_told_again_after_it_ceased() -> None:
    values = [0.0] * 4 + [0.95] * 6 + [0.0] * 6 + [0.95] * 4
    assert list(alarms("response/clip_share", values)) == [8, 20]


@pytest.mark.parametrize(
    ("key", "before", "after", "words", "config"),
    [
        ("actor/entropy", 2.0, 0.1, "the entropy collapses: 2 nats at first, 0.1 now", {}),
        ("rollout/logprob_diff_mean", 1e-6, 0.2, "sampler and trainer differ by 0.2 nats a token", {}),
        ("rollout/effective_sample_size", 0.99, 0.2, "the effective sample size is 20%", {}),
        ("rollout/masked_share", 0.1, 0.7, "70% of the trained tokens are left out of the loss", {}),
        ("actor/kl_k3", 0.01, 3.0, "the ratio of the loss runs away: 3 nats a token", {}),
        ("kl/loss", 0.01, 6.0, "the KL to the reference is 6 nats, over trainer.guards.max_kl=5", {"max_kl": 5.0}),
        ("kl/reward", 0.01, 6.0, "the KL to the reference is 6 nats", {"max_kl": 5.0}),
        ("response/clip_share", 0.1, 0.95, "95% of the responses are cut off at data.max_response_length", {}),
    ],
)
def test_each_alarm(key: str, before: float, after: float, words: str, config: dict[str, float]) -> None:
    assert not alarms(key, [before] * 20, **config)
    raised = alarms(key, [before] * 4 + [after] * 20, **config)
    assert len(raised) == 1 and 4 < min(raised) <= 8
    guards = Guards(GuardConfig(window=4, **config), [{key: before}] * 4)  # type: ignore[arg-type]
    for _ in range(3):
        guards.see({key: after})
    guards._told.clear()  # as if it had not been told while the window was mixed
    (said,) = guards.see({key: after})
    assert said.startswith(words)


def test_no_limit_and_no_window_raise_nothing() -> None:
    assert not alarms("kl/loss", [0.0] * 4 + [99.0] * 9)
    guards = Guards(GuardConfig(window=0))
    assert not any(guards.see({"actor/entropy": value}) for value in [2.0] * 20 + [0.0] * 20)


def test_what_was_seen_before_a_resume_counts() -> None:
    values = [2.0] * 6 + [0.1] * 6
    whole, earlier = Guards(GuardConfig(window=4)), [{"actor/entropy": value} for value in values[:7]]
    course = [whole.see({"actor/entropy": value}) for value in values]
    resumed = Guards(GuardConfig(window=4), earlier)
    assert [resumed.see({"actor/entropy": value}) for value in values[7:]] == course[7:]


def test_what_is_no_number_is_passed_over() -> None:
    guards = Guards(GuardConfig(window=2), [{"actor/entropy": None}, {"actor/entropy": math.nan}])
    assert [guards.see({"actor/entropy": value}) for value in (2.0, 2.0, math.inf)] == [[], [], []]
    assert len(guards.see({"actor/entropy": 0.0})) == 0  # (2 + 0) / 2 is half of the first mean
    assert len(guards.see({"actor/entropy": 0.0})) == 1


def test_settings_that_mean_nothing_are_refused() -> None:
    wrong = TrainerConfig(guards=GuardConfig(window=1, reward_drop=-1.0, entropy_share=math.nan))
    keys = {violation.key for violation in trainer_violations(wrong)}
    assert keys == {"trainer.guards.window", "trainer.guards.reward_drop", "trainer.guards.entropy_share"}
