"""Advantages of PRIME over ranks: the same bits however many there are, and those of a calculation token by token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mcore_rl.algorithms.kl import KlController
from mcore_rl.algorithms.process_rewards import process_metrics, stats_of
from mcore_rl.algorithms.step_batch import StepBatch
from mcore_rl.algorithms.token_advantages import Outcomes
from mcore_rl.config.algorithm import AlgorithmConfig
from mcore_rl.config.algorithms.prime import ProcessRewardConfig
from tests.algorithms.test_process_rewards import BETA, CONFIGS, Step, by_hand
from tests.controller.step.test_advantages import Found, as_bits, over_ranks
from tests.support.settings import algorithm_config


def step_batch(step: Step) -> StepBatch:
    scores_S = torch.tensor(step.scores)
    return StepBatch(
        batch=replace(step.batch, extra_S={"outcome_S": scores_S}),
        group_S=torch.tensor(step.groups),
        outcomes=Outcomes(scores_S=scores_S, truncated_S=torch.tensor(step.truncated)),
    )


def of_step(step: Step, config: AlgorithmConfig, dp: int) -> Found:
    return over_ranks(
        step_batch(step), config, KlController(config.kl_ctrl), dp, process_reward=ProcessRewardConfig(beta=BETA)
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_ranks_and_controller_make_the_formula(name: str) -> None:
    step, config = Step.drawn(5), CONFIGS[name]
    one, *more = (of_step(step, config, dp) for dp in (1, 2, 3, 11))
    assert one.batch.advantages_T is not None
    expected = [x for row in by_hand(step, config) for x in row]
    assert one.batch.mask_T.tolist() == [x is not None for x in expected]
    trained = one.batch.advantages_T[one.batch.mask_T].tolist()
    assert trained == pytest.approx([x for x in expected if x is not None], abs=5e-6)
    assert one.metrics["advantage/max"] == pytest.approx(max(trained), abs=1e-6)
    assert all(as_bits(other) == as_bits(one) for other in more)


def test_the_metrics_are_of_the_rewards_and_the_outcomes() -> None:
    step = Step.drawn(6)
    metrics = of_step(step, CONFIGS["published"], 2).metrics
    expected = process_metrics(stats_of(step.batch), torch.tensor(step.groups), torch.tensor(step.scores), BETA)
    assert {name: metrics[name] for name in expected} == expected and len(expected) == 2


def test_without_a_process_reward_model_nothing_of_it_is_there() -> None:
    config = algorithm_config(adv_estimator="rloo")
    plain = over_ranks(step_batch(Step.drawn(5)), config, KlController(config.kl_ctrl), 2)
    assert not any(name.startswith("process_reward/") for name in plain.metrics)
