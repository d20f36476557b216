"""From scores to what is trained on, by hand: which number goes where, in which order.

The algorithms themselves are held against float64 references in tests/algorithms.
"""

from __future__ import annotations

import asyncio
import math
import pickle
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_rl.algorithms.advantages.ragged import sequence_counts
from mcore_rl.algorithms.kl import KlController
from mcore_rl.algorithms.step_batch import StepBatch
from mcore_rl.algorithms.step_numbers import StepNumbers, finish
from mcore_rl.algorithms.token_advantages import Outcomes
from mcore_rl.config.algorithm import (
    AlgorithmConfig,
    CorrectionLevel,
    CorrectionMode,
    KlControl,
    KlControlConfig,
    KlUnit,
    OffPolicy,
    Rejection,
    RolloutCorrectionConfig,
)
from mcore_rl.config.algorithm_registry import estimators
from mcore_rl.config.roles import RoleConfig
from mcore_rl.config.stages import Estimate
from mcore_rl.config.trainer import PolicyModelConfig
from mcore_rl.controller.loop import StepState, run_stage
from mcore_rl.controller.step.updates import send
from mcore_rl.ground.types import TrainBatch
from mcore_rl.runtime.shard import Portion
from mcore_rl.tracking.clock import Clock
from tests.support.batches import LENGTHS as RAGGED
from tests.support.batches import ragged
from tests.support.in_process_group import InProcessGroup
from tests.support.settings import algorithm_config, any_run

# Two samples of one prompt of two tokens; responses of two tokens and of one.  Of prompts nothing may be read.
LENGTHS = (4, 3)
MASK = torch.tensor([0, 0, 1, 1, 0, 0, 1]).bool()
OLD = torch.tensor([0.0, -9.0, -1.0, -2.0, 0.0, -9.0, -1.0])
REF = torch.tensor([0.0, -5.0, -1.5, -2.0, 0.0, -5.0, -0.8])
ROLLOUT = torch.tensor([0.0, 0.0, -1.0, -2.0, 0.0, 0.0, -1.0])
VALUES = torch.tensor([9.0, 9.0, 0.2, 0.4, 9.0, 9.0, 0.1])
KL = KlControlConfig(kl_coef=0.1)


@dataclass
class Found:
    """What ranks would train with, in the order of the batch, and what was said of it."""

    batch: TrainBatch
    metrics: dict[str, float]


def over_ranks(groups: StepBatch, algorithm: AlgorithmConfig, kl: KlController, dp: int, **more: RoleConfig) -> Found:
    """Runs the stages of the estimator, and then the estimation.  more: groups of roles."""
    group, number = InProcessGroup(dp), len(groups.batch.lengths_S)
    shared = send(group, groups.batch, [range(number)])
    state = StepState(step=1, shared=shared, groups=groups, minibatches={})
    config = any_run(model=PolicyModelConfig(path="m"), algorithm=algorithm).with_groups(more)
    run: Any = SimpleNamespace(policy=group, clock=Clock(), kl=kl, config=config)
    metrics = dict[str, float]()
    for stage in (*estimators()[algorithm.adv_estimator].stages, Estimate(reads=())):
        metrics |= asyncio.run(run_stage(run, stage, state))
    step = state.advantages
    assert step is not None
    made = ("advantages_T", "teacher_advantages_T", "returns_T", "weights_T", "old_logprobs_T")
    fields = list(dict.fromkeys([*(name for name, _ in groups.batch.token_fields()), *made]))
    (refs,) = shared.shard_refs([[list(range(number))]], fields, [None])
    portion: Portion[None] = pickle.loads(refs.portion)
    (batch,) = portion.join([pickle.loads(shard) for shard in refs.shards])  # type: ignore[arg-type]
    assert torch.equal(step.trained_S, sequence_counts(batch.mask_T, batch.lengths_S))
    numbers = StepNumbers(whitening=step.advantages.whitening, mean_weight=step.mean_weight)
    advantages_S = step.advantages.advantages_S
    return Found(finish(batch, None if advantages_S is None else advantages_S.numpy(), numbers), metrics)


def step_of(algorithm: AlgorithmConfig, kl: KlController | None = None, dp: int = 2, **changes: torch.Tensor) -> Found:
    batch = TrainBatch(lengths_S=LENGTHS, tokens_T=torch.arange(7), mask_T=MASK, rollout_logprobs_T=ROLLOUT)
    batch = replace(batch, old_logprobs_T=OLD, ref_logprobs_T=REF, old_values_T=VALUES)
    groups = StepBatch(
        batch=replace(batch, **changes),
        group_S=torch.tensor([0, 0]),
        outcomes=Outcomes(
            scores_S=torch.tensor([1.0, 0.0]),
            truncated_S=torch.tensor([False, True]),
            greedy_S=torch.tensor([0.25, 0.25]),
        ),
    )
    return over_ranks(groups, algorithm, kl or KlController(algorithm.kl_ctrl), dp)


def advantages(step: Found) -> list[float]:
    assert step.batch.advantages_T is not None
    return step.batch.advantages_T[MASK].tolist()


def as_bits(step: Found) -> dict[str, object]:
    return {name: tensor.numpy().tobytes() for name, tensor in step.batch.token_fields()} | step.metrics


@pytest.mark.parametrize("estimator", list(estimators()))
@pytest.mark.parametrize("level", list(CorrectionLevel))
def test_no_bit_depends_on_how_many_ranks_there_are(estimator: str, level: CorrectionLevel) -> None:
    batch, draw = ragged(7), torch.Generator().manual_seed(3)
    size, number = len(batch.mask_T), len(RAGGED)
    drawn = [torch.randn(size, generator=draw) for _ in range(7)]
    batch = TrainBatch(
        lengths_S=batch.lengths_S, tokens_T=batch.tokens_T, mask_T=batch.mask_T, rollout_logprobs_T=drawn[0],
        old_logprobs_T=drawn[0] + drawn[1] / 9, ref_logprobs_T=drawn[2], old_values_T=drawn[3],
        turn_rewards_T=drawn[4],
        extra_T={"process_logprobs_T": drawn[5], "process_ref_logprobs_T": drawn[6]},
        extra_S={"outcome_S": torch.rand(number, generator=draw)},
    )  # fmt: skip
    groups = StepBatch(
        batch=batch,
        group_S=torch.arange(number) // 3,
        outcomes=Outcomes(
            scores_S=torch.randn(number, generator=draw),
            truncated_S=torch.arange(number) % 4 == 1,
            greedy_S=torch.randn(number, generator=draw),
            parts_SK=torch.randn(number, 3, generator=draw),
        ),
    )
    mode = CorrectionMode.mask if level is CorrectionLevel.token else CorrectionMode.truncate
    algorithm = algorithm_config(
        adv_estimator=estimator, gamma=0.9, lam=0.8, mask_truncated=True, use_kl_in_reward=True, whiten_advantages=True,
        off_policy=OffPolicy.decoupled, rollout_correction=RolloutCorrectionConfig(
            level=level, mode=mode, lower=0.9, upper=1.1, batch_normalize=True,
            reject=Rejection.seq_max_k3, reject_upper=0.05,
        ),
    )  # fmt: skip
    one, *more = (as_bits(over_ranks(groups, algorithm, KlController(KL), dp)) for dp in (1, 2, 3, number))
    assert all(each == one for each in more)


def test_leave_one_out_of_the_scores() -> None:
    step = step_of(algorithm_config(adv_estimator="rloo"))
    assert advantages(step) == [1.0, 1.0, -1.0]
    assert torch.equal(step.batch.mask_T, MASK) and step.batch.weights_T is None
    assert step.metrics["advantage/mean"] == pytest.approx(1 / 3)
    assert step.metrics["advantage/std"] == pytest.approx(math.sqrt(8 / 9))
    assert (step.metrics["advantage/min"], step.metrics["advantage/max"]) == (-1.0, 1.0)
    assert "kl/reward" not in step.metrics and "return/mean" not in step.metrics


def test_the_kl_is_taken_from_the_reward_with_the_coefficient_of_before() -> None:
    control = KlControlConfig(type=KlControl.adaptive, kl_coef=0.1, target_kl=0.01, horizon=10)
    control.target_kl_per = KlUnit.response
    algorithm = algorithm_config(adv_estimator="rloo", use_kl_in_reward=True, kl_ctrl=control)
    kl = KlController(control)
    step = step_of(algorithm, kl)
    # k1: 0.5 and 0 in the first response, -0.2 in the second: returns 1 - 0.05 and 0.02.
    assert advantages(step) == pytest.approx([0.93, 0.93, -0.93])
    assert step.metrics["kl/reward"] == pytest.approx(0.15)
    assert step.metrics["kl/reward_per_token"] == pytest.approx((0.25 - 0.2) / 2)
    assert step.metrics["kl/coef"] == 0.1
    # arXiv:1909.08593, section 2.2: the error, 14, is clipped to 0.2; two samples of a horizon of ten.
    assert kl.coef == pytest.approx(0.1 * (1 + 0.2 * 2 / 10))
    assert step_of(algorithm, kl).metrics["kl/coef"] == kl.coef / (1 + 0.2 * 2 / 10)


def test_the_critic_s_values_are_the_baseline_of_gae() -> None:
    step = step_of(algorithm_config(adv_estimator="gae"))
    # Returns less values are 0.8, 0.6 and -0.1, whose mean is 1.3 / 3; whitened, with the unbiased variance.
    centred = [0.8 - 1.3 / 3, 0.6 - 1.3 / 3, -0.1 - 1.3 / 3]
    deviation = math.sqrt(sum(x * x for x in centred) / 2)
    assert advantages(step) == pytest.approx([x / deviation for x in centred], rel=1e-5)
    assert step.batch.returns_T is not None
    assert step.batch.returns_T[MASK].tolist() == pytest.approx([1.0, 1.0, 0.0])
    assert step.metrics["return/mean"] == pytest.approx(2 / 3)
    assert step.metrics["value/mean"] == pytest.approx(0.7 / 3)


def test_the_greedy_score_is_the_baseline_of_remax() -> None:
    assert advantages(step_of(algorithm_config(adv_estimator="remax"))) == pytest.approx([0.75, 0.75, -0.25])


def test_responses_that_were_cut_off_are_not_trained_where_that_is_said() -> None:
    algorithm = algorithm_config(adv_estimator="remax", mask_truncated=True)
    step = step_of(algorithm)
    assert step.batch.mask_T.int().tolist() == [0, 0, 1, 1, 0, 0, 0]
    assert step.metrics["dropped/masked_sequences"] == 1.0
    assert step.metrics["advantage/min"] == step.metrics["advantage/max"] == 0.75
    assert "dropped/masked_sequences" not in step_of(replace(algorithm, mask_truncated=False)).metrics


def test_the_difference_to_the_sampler_weighs_the_loss() -> None:
    sampler = torch.tensor([0.0, 0.0, -1.0 - math.log(3), -2.0, 0.0, 0.0, -1.0 + math.log(2)])
    config = RolloutCorrectionConfig(level=CorrectionLevel.token, upper=2.0)
    algorithm = algorithm_config(adv_estimator="remax", off_policy=OffPolicy.decoupled, rollout_correction=config)
    step = step_of(algorithm, rollout_logprobs_T=sampler)
    assert step.batch.weights_T is not None
    assert step.batch.weights_T[MASK].tolist() == pytest.approx([2.0, 1.0, 0.5])
    assert step.metrics["rollout/logprob_diff_max"] == pytest.approx(math.log(3))
    assert step.metrics["rollout/ratio_mean"] == pytest.approx((3 + 1 + 0.5) / 3)
    assert step.metrics["rollout/truncated_share"] == pytest.approx(1 / 3)
    off = step_of(replace(algorithm, off_policy=OffPolicy.recompute), rollout_logprobs_T=sampler)
    assert off.batch.weights_T is None and torch.equal(off.batch.mask_T, MASK)
    shares = {"rollout/truncated_share", "rollout/masked_share"}
    assert off.metrics == {key: value for key, value in step.metrics.items() if key not in shares}


def test_a_batch_of_which_nothing_is_trained_has_no_advantages_to_tell_of() -> None:
    step = step_of(algorithm_config(adv_estimator="gae"), mask_T=torch.zeros(7, dtype=torch.bool))
    assert not [key for key in step.metrics if key.startswith(("advantage", "return", "value"))]


def test_the_kl_of_a_token_is_what_verl_s_target_is_held_against() -> None:
    """Of each response the mean over its tokens, 0.25 and -0.2, then over responses: 0.025, a quarter of the target."""
    control = KlControlConfig(type=KlControl.adaptive, kl_coef=0.1, target_kl=0.1, horizon=10)
    kl = KlController(control)
    algorithm = algorithm_config(adv_estimator="rloo", use_kl_in_reward=True, kl_ctrl=control)
    step_of(algorithm, kl)
    assert kl.coef == pytest.approx(0.1 * (1 - 0.2 * 2 / 10))
    per_response = KlController(replace(control, target_kl_per=KlUnit.response))  # 0.15: above it
    step_of(algorithm, per_response)
    assert per_response.coef == pytest.approx(0.1 * (1 + 0.2 * 2 / 10))


@pytest.mark.parametrize("in_baseline", [True, False])
def test_a_response_that_was_cut_off_is_compared_with_or_not(in_baseline: bool) -> None:
    """Of scores 1 and 0 the second is cut off: it is the first one's baseline, or the first has none."""
    algorithm = algorithm_config(
        adv_estimator="rloo", mask_truncated=True, masked_in_baseline=in_baseline, use_kl_in_reward=True,
        kl_ctrl=KL,
    )  # fmt: skip
    step = step_of(algorithm)
    assert step.batch.mask_T.int().tolist() == [0, 0, 1, 1, 0, 0, 0]
    # The KL in its reward comes along: returns are 1 - 0.05 and 0 + 0.02.
    expected = [0.93, 0.93, 0.0] if in_baseline else [0.0, 0.0, 0.0]
    assert advantages(step) == pytest.approx(expected)
    assert step.metrics["advantage/min"] == step.metrics["advantage/max"] == pytest.approx(expected[0])
    assert step.metrics["kl/reward"] == pytest.approx(0.15), "of all responses, trained or not"


def test_masked_responses_are_not_whitened_with() -> None:
    algorithm = algorithm_config(adv_estimator="gae", mask_truncated=True)
    step = step_of(algorithm)  # returns less values of the first response: 0.8 and 0.6
    assert advantages(step) == pytest.approx([0.5**0.5, -(0.5**0.5), 0.0], rel=1e-5)
    assert step.metrics["return/mean"] == pytest.approx(1.0)


SAMPLER = torch.tensor([0.0, 0.0, -1.0 - math.log(3), -2.0, 0.0, 0.0, -1.0 + math.log(2)])  # ratios 3, 1 and 1/2


def test_normalized_weights_have_mean_1() -> None:
    config = RolloutCorrectionConfig(level=CorrectionLevel.token, upper=2.0, batch_normalize=True)
    algorithm = algorithm_config(adv_estimator="remax", off_policy=OffPolicy.decoupled, rollout_correction=config)
    for dp in (1, 2):
        step = step_of(algorithm, dp=dp, rollout_logprobs_T=SAMPLER)
        assert step.batch.weights_T is not None
        assert step.batch.weights_T[MASK].tolist() == pytest.approx([2 * 6 / 7, 6 / 7, 3 / 7])


def test_bypassed_the_loss_s_ratio_is_that_to_the_sampler() -> None:
    algorithm = algorithm_config(adv_estimator="remax")
    bypassing = replace(algorithm, off_policy=OffPolicy.bypass)
    bypassed, before = step_of(bypassing, rollout_logprobs_T=SAMPLER), step_of(algorithm, rollout_logprobs_T=SAMPLER)
    assert bypassed.batch.old_logprobs_T is not None and before.batch.old_logprobs_T is not None
    assert torch.equal(bypassed.batch.old_logprobs_T, SAMPLER) and torch.equal(before.batch.old_logprobs_T, OLD)
    assert bypassed.metrics == before.metrics, "what sampler and trainer differ in is measured where it is known"
    assert advantages(bypassed) == advantages(before)


def test_bypassed_nothing_needs_the_pass() -> None:
    """The sampler's log-probs stand in the KL of the reward, and where tokens are selected, too."""
    algorithm = algorithm_config(
        adv_estimator="rloo", off_policy=OffPolicy.bypass, use_kl_in_reward=True, kl_ctrl=KL, mask_truncated=True
    )
    batch = {"rollout_logprobs_T": SAMPLER, "old_logprobs_T": None}
    step = step_of(algorithm, **batch)  # type: ignore[arg-type]
    expected = step_of(replace(algorithm, off_policy=OffPolicy.recompute), old_logprobs_T=SAMPLER)
    assert step.batch.old_logprobs_T is not None and torch.equal(step.batch.old_logprobs_T, SAMPLER)
    assert advantages(step) == advantages(expected)
    assert step.metrics == {key: value for key, value in expected.metrics.items() if not key.startswith("rollout/")}
