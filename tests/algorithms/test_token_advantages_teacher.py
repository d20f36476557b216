"""A teacher's part of the advantages: token by token in float64, and what its policy gradient is in expectation."""

from __future__ import annotations

import math
import random

import pytest
import torch

from mcore_rl.algorithms.advantages.estimation import estimate
from mcore_rl.algorithms.kl import kl_k1
from mcore_rl.algorithms.step_numbers import StepNumbers, finish
from mcore_rl.algorithms.token_advantages import TEACHER_LOGPROBS, Outcomes, SequenceStats, compute_advantages
from mcore_rl.config.algorithm import AlgorithmConfig, DistillConfig, OffPolicy
from mcore_rl.config.algorithm_object import Scope
from mcore_rl.config.algorithm_registry import estimators
from mcore_rl.ground.types import TrainBatch
from tests.algorithms.advantages.test_estimation import ETA, GAMMA, LAM, PASS_K, WEIGHTS, expected
from tests.algorithms.cases import ALL, Case
from tests.support.settings import algorithm_config

COEF = 0.6
ESTIMATORS = [name for name, each in estimators().items() if each.scope is not Scope.pair]  # pairs have no advantages
Rows = list[list[float]]


def drawn(case: Case, seed: int) -> Rows:
    """Log-probs of each token; of untrained ones no numbers."""
    draw = random.Random(seed)
    return [[draw.gauss(-2, 1) if kept else math.nan for kept in mask] for mask in case.masks]


def flat(rows: Rows) -> torch.Tensor:
    return torch.tensor([x for row in rows for x in row], dtype=torch.float64)


def config_of(estimator: str, whiten: bool, off_policy: OffPolicy = OffPolicy.recompute) -> AlgorithmConfig:
    return algorithm_config(
        adv_estimator=estimator, gamma=GAMMA, lam=LAM, whiten_advantages=whiten, gdpo_reward_weights=WEIGHTS,
        pass_k=PASS_K, sppo_eta=ETA, off_policy=off_policy, distill=DistillConfig(coef=COEF),
    )  # fmt: skip


def estimated(
    case: Case, algorithm: AlgorithmConfig, old: Rows, sampler: Rows, teacher: Rows
) -> tuple[torch.Tensor, SequenceStats]:
    """Final advantages [T] and statistics, by way of what ranks and controller do."""
    inputs, number = case.inputs(), len(case.masks)
    batch = TrainBatch(
        lengths_S=case.lengths,
        tokens_T=torch.zeros(sum(case.lengths), dtype=torch.int64),
        mask_T=inputs.mask_T,
        old_logprobs_T=flat(old),
        rollout_logprobs_T=flat(sampler),
        turn_rewards_T=inputs.process_T,
        old_values_T=inputs.values_T,
        extra_T={TEACHER_LOGPROBS: flat(teacher)},
    )
    outcomes = Outcomes(
        scores_S=torch.zeros(number, dtype=torch.float64), truncated_S=torch.zeros(number, dtype=torch.bool),
        greedy_S=inputs.greedy_S, parts_SK=case.parts_SK(),
    )  # fmt: skip
    tokens, stats = compute_advantages(batch, outcomes, algorithm, 0.0)
    of_step = estimate(
        case.group_S, stats.scores_S, stats.counts_S, stats.advantages, algorithm, members_S=stats.members_S,
        parts_SK=case.parts_SK(),
    )  # fmt: skip
    made = {name: x for name, x in vars(tokens).items() if x is not None}
    batch = TrainBatch.of_fields(batch.lengths_S, dict(batch.token_fields()) | made)
    advantages_S = None if of_step.advantages_S is None else of_step.advantages_S.numpy()
    final = finish(batch, advantages_S, StepNumbers(whitening=of_step.whitening))
    assert final.advantages_T is not None and final.teacher_advantages_T is None, "it is added once"
    return final.advantages_T, stats


@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_teacher_s_part_is_added_to_those_of_every_estimator(estimator: str, whiten: bool) -> None:
    """``A - coef * (log p_old - log p_teacher)``, A whitened or not, written out for lists of floats."""
    algorithm = config_of(estimator, whiten)
    for name, case in ALL.items():
        old, sampler, teacher = (drawn(case, seed) for seed in (1, 2, 3))
        part = [
            [-COEF * (o - t) for o, t in zip(*rows, strict=True)]
            for rows in zip(case.trained(old), case.trained(teacher), strict=True)
        ]
        by_hand = [a + d for a, d in zip(expected(case, algorithm), case.at_tokens(part), strict=True)]
        advantages_T, _ = estimated(case, algorithm, old, sampler, teacher)
        # Whitening enlarges the rounding of all but equal values (test_estimation.py).
        torch.testing.assert_close(
            advantages_T, torch.tensor(by_hand, dtype=torch.float64), atol=1e-10, rtol=1e-10, msg=name
        )


@pytest.mark.parametrize("off_policy", list(OffPolicy))
def test_the_distance_is_from_the_policy_that_the_ratio_is_taken_to(off_policy: OffPolicy) -> None:
    algorithm = config_of("none", False, off_policy)
    for name, case in ALL.items():
        old, sampler, teacher = (drawn(case, seed) for seed in (1, 2, 3))
        before = sampler if off_policy is OffPolicy.bypass else old
        distances = [
            o - t
            for rows in zip(case.trained(before), case.trained(teacher), strict=True)
            for o, t in zip(*rows, strict=True)
        ]
        advantages_T, stats = estimated(case, algorithm, old, sampler, teacher)
        torch.testing.assert_close(
            advantages_T[case.inputs().mask_T], -COEF * torch.tensor(distances, dtype=torch.float64), msg=name
        )
        assert stats.reverse_kl is not None
        total = stats.reverse_kl.total()
        assert (total is None) == (not distances), name
        if total is not None:
            centre = math.fsum(distances) / len(distances)
            variance = math.fsum((x - centre) ** 2 for x in distances) / len(distances)
            assert (total.count, total.high) == (len(distances), max(distances)), name
            assert (total.mean, total.variance) == pytest.approx((centre, variance), rel=1e-10, abs=1e-12), name


def test_without_a_coefficient_there_is_no_teacher() -> None:
    case, algorithm = ALL["drawn_0"], algorithm_config(adv_estimator="grpo")
    old, sampler = drawn(case, 1), drawn(case, 2)
    _, stats = estimated(case, algorithm, old, sampler, [[math.nan] * len(row) for row in old])
    assert stats.reverse_kl is None


def test_in_expectation_the_policy_gradient_is_that_of_the_reverse_kl() -> None:
    """Over a vocabulary of 7, every token drawn with its probability; the KL's gradient by central differences."""
    draw, step = torch.Generator().manual_seed(4), 1e-6
    logits_V, teacher_V = torch.randn(2, 7, dtype=torch.float64, generator=draw)
    teacher_V = teacher_V.log_softmax(0)

    def kl(logits_V: torch.Tensor) -> float:
        return float((logits_V.softmax(0) * (logits_V.log_softmax(0) - teacher_V)).sum())

    by_differences = [
        (kl(logits_V + step * unit_V) - kl(logits_V - step * unit_V)) / (2 * step)
        for unit_V in torch.eye(7, dtype=torch.float64)
    ]
    logits_V.requires_grad_()
    logprobs_V = logits_V.log_softmax(0)
    advantages_V = -kl_k1(logprobs_V.detach(), teacher_V)
    (logprobs_V.exp().detach() * -advantages_V * logprobs_V).sum().backward()
    assert logits_V.grad is not None
    torch.testing.assert_close(logits_V.grad, torch.tensor(by_differences, dtype=torch.float64), atol=1e-9, rtol=1e-7)
