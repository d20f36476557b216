"""A teacher's part of the advantages over ranks: no bit depends on their number, and the metrics are those by hand."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

from mcore_rl.algorithms.kl import KlController
from mcore_rl.algorithms.step_batch import StepBatch
from mcore_rl.algorithms.token_advantages import TEACHER_LOGPROBS, Outcomes
from mcore_rl.config.algorithm import (
    AlgorithmConfig,
    CorrectionMode,
    DistillConfig,
    OffPolicy,
    RolloutCorrectionConfig,
)
from mcore_rl.config.algorithm_registry import estimators
from mcore_rl.controller.step.advantages import estimate_step
from mcore_rl.controller.step.updates import send
from mcore_rl.ground.types import TAUGHT_BY, TrainBatch
from tests.controller.step.test_advantages import KL, LENGTHS, MASK, OLD, ROLLOUT, advantages, as_bits, over_ranks
from tests.controller.step.test_advantages import Found as Estimated
from tests.support.batches import LENGTHS as RAGGED
from tests.support.batches import ragged
from tests.support.in_process_group import InProcessGroup
from tests.support.settings import algorithm_config

NAN = float("nan")
TEACHER = torch.tensor([NAN, NAN, -1.5, -1.0, NAN, NAN, -3.0])  # of prompts nothing may be read
DISTANCES = [0.5, -1.0, 2.0]  # OLD - TEACHER at the three trained tokens


def step_batch(**changes: Any) -> StepBatch:
    batch = TrainBatch(
        lengths_S=LENGTHS, tokens_T=torch.arange(7), mask_T=MASK, rollout_logprobs_T=ROLLOUT, old_logprobs_T=OLD,
        extra_T={TEACHER_LOGPROBS: TEACHER},
    )  # fmt: skip
    outcomes = Outcomes(scores_S=torch.tensor([1.0, 0.0]), truncated_S=torch.tensor([False, True]))
    return StepBatch(
        batch=replace(batch, **changes), group_S=torch.tensor([0, 0]), outcomes=outcomes
    )  # fmt: skip


def step_of(algorithm: AlgorithmConfig, **changes: torch.Tensor) -> Estimated:
    return over_ranks(step_batch(**changes), algorithm, KlController(algorithm.kl_ctrl), 2)


def test_a_teacher_alone() -> None:
    step = step_of(algorithm_config(adv_estimator="none", distill=DistillConfig(coef=1.0)))
    assert advantages(step) == [-each for each in DISTANCES]
    assert step.metrics["distill/reverse_kl"] == pytest.approx(0.5)
    assert step.metrics["distill/reverse_kl_std"] == pytest.approx(((0 + 2.25 + 2.25) / 3) ** 0.5)
    assert step.metrics["distill/reverse_kl_max"] == 2.0
    assert (step.metrics["advantage/mean"], step.metrics["advantage/std"]) == (0, 0)


def test_each_of_several_teachers_has_a_mean_of_its_own() -> None:
    """The first response has two trained tokens, the second one; the third teacher has none."""
    groups = step_batch(extra_S={TAUGHT_BY: torch.tensor([1.0, 0.0])})
    groups = replace(groups, taught_by=("teacher.path", "openai/gsm8k", "math"))
    algorithm = algorithm_config(adv_estimator="none", distill=DistillConfig(coef=1.0))
    metrics = over_ranks(groups, algorithm, KlController(KL), 2).metrics
    of_teachers = {key: value for key, value in metrics.items() if key.startswith("distill/reverse_kl/")}
    expected = {"teacher.path": DISTANCES[2], "openai/gsm8k": sum(DISTANCES[:2]) / 2}
    assert of_teachers == {f"distill/reverse_kl/{name}": pytest.approx(mean) for name, mean in expected.items()}
    assert metrics["distill/reverse_kl"] == pytest.approx(sum(DISTANCES) / 3)


def test_a_teacher_beside_the_reward() -> None:
    step = step_of(algorithm_config(adv_estimator="rloo", distill=DistillConfig(coef=0.5)))
    assert advantages(step) == [1 - 0.25, 1 + 0.5, -1 - 1.0]
    assert step.metrics["advantage/max"] == 1.0, "the estimator's"


def test_the_mean_of_a_step_is_that_of_both_parts() -> None:
    """By which tokens are selected (algorithms/selection.py)."""
    algorithm = algorithm_config(adv_estimator="raft", distill=DistillConfig(coef=0.5))
    groups = step_batch()
    shared = send(InProcessGroup(2), groups.batch, [range(2)])
    step = asyncio.run(estimate_step(InProcessGroup(2), shared, groups, groups.outcomes, algorithm, KlController(KL)))
    assert step.mean_advantage == pytest.approx((2 * 1 - 0.5 * sum(DISTANCES)) / 3)
    assert step.metrics["advantage/mean"] == pytest.approx(2 / 3)


def test_what_is_not_trained_is_not_compared() -> None:
    """Neither a response that was cut off, nor a token that the correction leaves out."""
    algorithm = algorithm_config(adv_estimator="none", distill=DistillConfig(coef=1.0), mask_truncated=True)
    step = step_of(algorithm)
    assert advantages(step) == [-0.5, 1.0, 0.0] and step.metrics["distill/reverse_kl"] == pytest.approx(-0.25)
    masking = replace(
        algorithm, mask_truncated=False, off_policy=OffPolicy.decoupled,
        rollout_correction=RolloutCorrectionConfig(mode=CorrectionMode.mask, lower=0.9, upper=1.1),
    )  # fmt: skip
    step = step_of(masking, rollout_logprobs_T=torch.where(torch.arange(7) == 3, -4.0, ROLLOUT))
    assert advantages(step) == [-0.5, 0.0, -2.0] and step.batch.mask_T.tolist() == [
        *[False] * 2,
        True,
        *[False] * 3,
        True,
    ]


@pytest.mark.parametrize("estimator", list(estimators()))
def test_no_bit_depends_on_how_many_ranks_there_are(estimator: str) -> None:
    batch, draw = ragged(7), torch.Generator().manual_seed(3)
    size, number = len(batch.mask_T), len(RAGGED)
    drawn = [torch.randn(size, generator=draw) for _ in range(6)]
    groups = StepBatch(
        batch=TrainBatch(
            lengths_S=batch.lengths_S, tokens_T=batch.tokens_T, mask_T=batch.mask_T, rollout_logprobs_T=drawn[0],
            old_logprobs_T=drawn[1], old_values_T=drawn[2],
            extra_T={
                TEACHER_LOGPROBS: drawn[3], "process_logprobs_T": drawn[4], "process_ref_logprobs_T": drawn[5],
            },
            extra_S={"outcome_S": torch.rand(number, generator=draw)},
        ),
        group_S=torch.arange(number) // 3,
        outcomes=Outcomes(
            scores_S=torch.randn(number, generator=draw),
            truncated_S=torch.arange(number) % 4 == 1,
            greedy_S=torch.randn(number, generator=draw),
            parts_SK=torch.randn(number, 3, generator=draw),
        ),
    )  # fmt: skip
    algorithm = algorithm_config(
        adv_estimator=estimator, gamma=0.9, lam=0.8, mask_truncated=True, whiten_advantages=True,
        distill=DistillConfig(coef=0.7),
    )  # fmt: skip
    one, *more = (as_bits(over_ranks(groups, algorithm, KlController(KL), dp)) for dp in (1, 2, 3, number))
    assert all(each == one for each in more)
