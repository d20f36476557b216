"""From scores to what is trained on, by hand: which number goes where, in which order.

The algorithms themselves are held against float64 references in tests/algorithms.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from mcore_rl.algorithms.kl import KlController
from mcore_rl.config.algorithm import (
    AdvEstimator,
    AlgorithmConfig,
    CorrectionLevel,
    KlControl,
    KlControlConfig,
    RolloutCorrectionConfig,
)
from mcore_rl.controller.learning import Lesson, lesson
from mcore_rl.controller.trajectories import Groups
from mcore_rl.types import TrainBatch

# Two samples of one prompt of two tokens; responses of two tokens and of one.  Of prompts nothing may be read.
LENGTHS = (4, 3)
MASK = torch.tensor([0, 0, 1, 1, 0, 0, 1]).bool()
OLD = torch.tensor([0.0, -9.0, -1.0, -2.0, 0.0, -9.0, -1.0])
REF = torch.tensor([0.0, -5.0, -1.5, -2.0, 0.0, -5.0, -0.8])
ROLLOUT = torch.tensor([0.0, 0.0, -1.0, -2.0, 0.0, 0.0, -1.0])
VALUES = torch.tensor([9.0, 9.0, 0.2, 0.4, 9.0, 9.0, 0.1])
KL = KlControlConfig(kl_coef=0.1)


def learn(algorithm: AlgorithmConfig, kl: KlController | None = None, **changes: torch.Tensor) -> Lesson:
    groups = Groups(
        trajectories=(),
        batch=TrainBatch(lengths_S=LENGTHS, tokens_T=torch.arange(7), mask_T=MASK, rollout_logprobs_T=ROLLOUT),
        group_S=torch.tensor([0, 0]),
        scores_S=torch.tensor([1.0, 0.0]),
        truncated_S=torch.tensor([False, True]),
        greedy_S=torch.tensor([0.25, 0.25]),
    )
    batch = replace(groups.batch, old_logprobs_T=OLD, ref_logprobs_T=REF, old_values_T=VALUES)
    batch = replace(batch, **changes)
    return lesson(groups, batch, algorithm, kl or KlController(algorithm.kl_ctrl))


def advantages(found: Lesson) -> list[float]:
    assert found.batch.advantages_T is not None
    return found.batch.advantages_T[MASK].tolist()


def test_leave_one_out_of_the_scores() -> None:
    found = learn(AlgorithmConfig(adv_estimator=AdvEstimator.rloo))
    assert advantages(found) == [1.0, 1.0, -1.0]
    assert torch.equal(found.batch.mask_T, MASK) and found.batch.weights_T is None
    assert found.metrics["advantage/mean"] == pytest.approx(1 / 3)
    assert found.metrics["advantage/std"] == pytest.approx(math.sqrt(8 / 9))
    assert (found.metrics["advantage/min"], found.metrics["advantage/max"]) == (-1.0, 1.0)
    assert "kl/reward" not in found.metrics and "return/mean" not in found.metrics


def test_the_kl_is_taken_from_the_reward_with_the_coefficient_of_before() -> None:
    control = KlControlConfig(type=KlControl.adaptive, kl_coef=0.1, target_kl=0.01, horizon=10)
    algorithm = AlgorithmConfig(adv_estimator=AdvEstimator.rloo, use_kl_in_reward=True, kl_ctrl=control)
    kl = KlController(control)
    found = learn(algorithm, kl)
    # k1: 0.5 and 0 in the first response, -0.2 in the second: returns 1 - 0.05 and 0.02.
    assert advantages(found) == pytest.approx([0.93, 0.93, -0.93])
    assert found.metrics["kl/reward"] == pytest.approx(0.15)
    assert found.metrics["kl/coef"] == 0.1
    # arXiv:1909.08593, section 2.2: the error, 14, is clipped to 0.2; two samples of a horizon of ten.
    assert kl.coef == pytest.approx(0.1 * (1 + 0.2 * 2 / 10))
    assert learn(algorithm, kl).metrics["kl/coef"] == kl.coef / (1 + 0.2 * 2 / 10)


def test_the_critic_s_values_are_the_baseline_of_gae() -> None:
    found = learn(AlgorithmConfig(adv_estimator=AdvEstimator.gae))
    # Returns less values are 0.8, 0.6 and -0.1, whose mean is 1.3 / 3; whitened, with the unbiased variance.
    centred = [0.8 - 1.3 / 3, 0.6 - 1.3 / 3, -0.1 - 1.3 / 3]
    deviation = math.sqrt(sum(x * x for x in centred) / 2)
    assert advantages(found) == pytest.approx([x / deviation for x in centred], rel=1e-5)
    assert found.batch.returns_T is not None
    assert found.batch.returns_T[MASK].tolist() == pytest.approx([1.0, 1.0, 0.0])
    assert found.metrics["return/mean"] == pytest.approx(2 / 3)
    assert found.metrics["value/mean"] == pytest.approx(0.7 / 3)


def test_the_greedy_score_is_the_baseline_of_remax() -> None:
    assert advantages(learn(AlgorithmConfig(adv_estimator=AdvEstimator.remax))) == pytest.approx([0.75, 0.75, -0.25])


def test_responses_that_were_cut_off_are_not_trained_where_that_is_said() -> None:
    algorithm = AlgorithmConfig(adv_estimator=AdvEstimator.remax, mask_truncated=True)
    found = learn(algorithm)
    assert found.batch.mask_T.int().tolist() == [0, 0, 1, 1, 0, 0, 0]
    assert found.metrics["dropped/masked_sequences"] == 1.0
    assert found.metrics["advantage/min"] == found.metrics["advantage/max"] == 0.75
    assert "dropped/masked_sequences" not in learn(replace(algorithm, mask_truncated=False)).metrics


def test_the_difference_to_the_sampler_weighs_the_loss() -> None:
    sampler = torch.tensor([0.0, 0.0, -1.0 - math.log(3), -2.0, 0.0, 0.0, -1.0 + math.log(2)])
    config = RolloutCorrectionConfig(level=CorrectionLevel.token, upper=2.0)
    algorithm = AlgorithmConfig(adv_estimator=AdvEstimator.remax, rollout_correction=config)
    found = learn(algorithm, rollout_logprobs_T=sampler)
    assert found.batch.weights_T is not None
    assert found.batch.weights_T[MASK].tolist() == pytest.approx([2.0, 1.0, 0.5])
    assert found.metrics["rollout/logprob_diff_max"] == pytest.approx(math.log(3))
    assert found.metrics["rollout/correction_weight_mean"] == pytest.approx((3 + 1 + 0.5) / 3)
    assert found.metrics["rollout/correction_clip_share"] == pytest.approx(1 / 3)
    off = learn(replace(algorithm, rollout_correction=RolloutCorrectionConfig()), rollout_logprobs_T=sampler)
    assert off.batch.weights_T is None
    assert off.metrics["rollout/logprob_diff_max"] == pytest.approx(math.log(3))
    assert not [key for key in off.metrics if "correction" in key]


def test_a_batch_of_which_nothing_is_trained_has_no_advantages_to_tell_of() -> None:
    found = learn(AlgorithmConfig(adv_estimator=AdvEstimator.gae), mask_T=torch.zeros(7, dtype=torch.bool))
    assert not [key for key in found.metrics if key.startswith(("advantage", "return", "value"))]
