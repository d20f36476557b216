"""PRIME's advantages against a calculation token by token in lists of float64, on ragged groups and edge cases."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import pytest
import torch

from mcore_rl.algorithms.advantages.estimation import estimate, final_advantages
from mcore_rl.algorithms.process_rewards import (
    LOGPROBS,
    REF_LOGPROBS,
    ProcessStats,
    centred,
    process_metrics,
    stats_of,
    token_rewards,
)
from mcore_rl.algorithms.token_advantages import Outcomes, compute_advantages
from mcore_rl.config.algorithm import AlgorithmConfig
from mcore_rl.config.algorithms.prime import ProcessNorm
from mcore_rl.ground.types import TrainBatch
from tests.support.settings import algorithm_config, any_run

BETA = 0.3
PLAIN = algorithm_config(adv_estimator="prime", process_coef=5.0, outcome_coef=2.0)


@dataclass(frozen=True)
class Step:
    """Responses: the group and the score of each, whether a token is trained, and log-ratios of all tokens."""

    groups: list[int]
    scores: list[float]
    masks: list[list[bool]]
    ratios: list[list[float]]
    truncated: list[bool]

    @classmethod
    def drawn(cls, seed: int) -> Step:
        """Groups of four, four, one and two, out of order.

        The first group is all right, the second all wrong; responses 4 and 5 are empty; masks have holes.
        """
        draw = random.Random(seed)
        groups = [0, 1, 0, 3, 1, 0, 2, 1, 0, 3, 1]
        scores = [1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0]
        lengths = [5, 9, 2, 7, 1, 4, 6, 3, 8, 5, 4]
        masks = [[False, *(draw.random() < 0.8 for _ in range(length - 1))] for length in lengths]
        masks[5] = [False] * 4
        for place in (0, 1, 2, 3, 6, 7, 8, 9, 10):
            masks[place][1] = True
        ratios = [[draw.gauss(0, 1) for _ in mask] for mask in masks]
        return cls(groups, scores, masks, ratios, [draw.random() < 0.4 for _ in groups])

    @property
    def batch(self) -> TrainBatch:
        ratios_T = torch.tensor([x for row in self.ratios for x in row])
        ref_T = torch.linspace(-3, -1, len(ratios_T))
        mask_T = torch.tensor([x for row in self.masks for x in row])
        noise = {LOGPROBS: ref_T + ratios_T, REF_LOGPROBS: ref_T}
        return TrainBatch(
            lengths_S=tuple(map(len, self.masks)),
            tokens_T=torch.zeros(len(mask_T), dtype=torch.int64),
            mask_T=mask_T,
            rollout_logprobs_T=torch.zeros(len(mask_T)),
            extra_T={name: x_T.masked_fill(~mask_T, torch.nan) for name, x_T in noise.items()},
        )


def by_hand(step: Step, config: AlgorithmConfig, beta: float = BETA) -> list[list[float | None]]:
    """The advantage of each token, None where it is not trained: sums over later tokens, one after another."""
    out = [cut and config.mask_truncated for cut in step.truncated]
    count = len(step.groups)
    rewards = [
        [beta * x for x, kept in zip(row, mask, strict=True) if kept]
        for row, mask in zip(step.ratios, step.masks, strict=True)
    ]
    member = [bool(row) and (config.masked_in_baseline or not cut) for row, cut in zip(rewards, out, strict=True)]
    if config.process_norm is ProcessNorm.batch:
        peak = max(
            abs(math.fsum(row[t:]))
            for row, there in zip(rewards, member, strict=True)
            if there
            for t in range(len(row))
        )
        rewards = [[x / (peak + 1e-6) for x in row] for row in rewards]
    raw: list[list[float] | None] = []
    for index in range(count):
        siblings = [each for each in range(count) if step.groups[each] == step.groups[index] and member[each]]
        n = len(siblings)
        if not member[index] or n < 2 or out[index]:
            raw.append(None)
            continue
        means = [math.fsum(rewards[each]) / len(rewards[each]) for each in siblings]
        process = [n / (n - 1) * x - math.fsum(means) / (n - 1) for x in rewards[index]]
        others = [step.scores[each] for each in siblings if each != index]
        earned = [config.process_coef * x for x in process]
        earned[-1] += config.outcome_coef * (step.scores[index] - math.fsum(others) / (n - 1))
        raw.append(
            [sum(config.gamma ** (s - t) * earned[s] for s in range(t, len(earned))) for t in range(len(earned))]
        )
    everyone = [x for row in raw if row for x in row]
    mean = math.fsum(everyone) / len(everyone)
    deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in everyone) / (len(everyone) - 1) + 1e-8)
    advantages = list[list[float | None]]()
    for mask, row in zip(step.masks, raw, strict=True):
        left = iter(row or [])
        advantages.append([(next(left) - mean) / deviation if kept and row else None for kept in mask])
    return advantages


def by_package(
    step: Step, config: AlgorithmConfig, **changes: torch.Tensor
) -> tuple[list[list[float | None]], Outcomes]:
    """The same with what ranks and controller call."""
    batch, group_S = replace(step.batch, **changes), torch.tensor(step.groups)
    outcomes = Outcomes(scores_S=torch.tensor(step.scores), truncated_S=torch.tensor(step.truncated))
    member_S = torch.ones(len(step.groups), dtype=torch.bool)
    if config.mask_truncated and not config.masked_in_baseline:
        member_S = ~outcomes.truncated_S
    rewards = centred(stats_of(batch), group_S, outcomes.scores_S, member_S, beta=BETA, config=config)
    outcomes = replace(outcomes, scores_S=rewards.outcomes_S, compared_S=rewards.compared_S)
    values = {"process_scales": rewards.scales_S, "process_shifts": rewards.shifts_S}
    batch = replace(batch, extra_T={**batch.extra_T, **token_rewards(batch, values, any_run())})
    tokens, stats = compute_advantages(batch, outcomes, config, 0.0)
    of_step = estimate(group_S, stats.scores_S, stats.counts_S, stats.advantages, config, members_S=stats.members_S)
    lengths = list(batch.lengths_S)
    final_T = final_advantages(tokens.advantages_T, of_step.advantages_S, of_step.whitening, tokens.mask_T, lengths)
    rows = zip(final_T.split(lengths), tokens.mask_T.split(lengths), strict=True)
    return [
        [x if kept else None for x, kept in zip(*map(torch.Tensor.tolist, row), strict=True)] for row in rows
    ], outcomes


CONFIGS = {
    "published": PLAIN,
    "paper": replace(PLAIN, process_norm=ProcessNorm.none, process_coef=1.0, outcome_coef=1.0),
    "discounted": replace(PLAIN, gamma=0.9),
    "process alone": replace(PLAIN, outcome_coef=0.0),
    "outcome alone": replace(PLAIN, process_coef=0.0),
    "masked": replace(PLAIN, mask_truncated=True),
    "masked, no members": replace(PLAIN, mask_truncated=True, masked_in_baseline=False),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("seed", range(4))
def test_advantages_are_those_of_the_formula(name: str, seed: int) -> None:
    step = Step.drawn(seed)
    expected, (advantages, _) = by_hand(step, CONFIGS[name]), by_package(step, CONFIGS[name])
    assert [[x is None for x in row] for row in advantages] == [[x is None for x in row] for row in expected]
    for mine, theirs in zip(advantages, expected, strict=True):
        # float32: a return is a sum of up to 9 rewards of about 1, and of differences of these.
        assert [x for x in mine if x is not None] == pytest.approx([x for x in theirs if x is not None], abs=5e-6)


def test_an_only_sample_and_an_empty_response_are_not_trained() -> None:
    advantages, outcomes = by_package(Step.drawn(1), PLAIN)
    assert outcomes.compared_S is not None
    for place in (5, 6):
        assert not any(x is not None for x in advantages[place])
        assert not bool(outcomes.compared_S[place]) and float(outcomes.scores_S[place]) == 0
    assert all(x is not None for x in advantages[8][1:2])


def test_all_right_and_all_wrong_groups_have_no_outcome_part() -> None:
    _, outcomes = by_package(Step.drawn(2), PLAIN)
    assert outcomes.scores_S[[0, 1, 2, 4, 7, 8, 10]].eq(0).all()
    assert outcomes.scores_S[[3, 9]].tolist() == [2.0, -2.0]


def test_leave_one_out_of_means() -> None:
    """The mean of a response's centred process rewards is its mean less that of the others' means."""
    config = replace(PLAIN, process_norm=ProcessNorm.none, process_coef=1.0)
    stats = ProcessStats(
        sums_S=torch.tensor([6.0, 4.0, -1.0]).double(), counts_S=torch.tensor([3, 1, 2]), peaks_S=torch.ones(3).double()
    )
    rewards = centred(stats, torch.zeros(3), torch.zeros(3), torch.ones(3, dtype=torch.bool), beta=1.0, config=config)
    means = [2.0, 4.0, -0.5]
    for index, mean in enumerate(means):
        others = [each for place, each in enumerate(means) if place != index]
        own = float(rewards.scales_S[index]) * mean - float(rewards.shifts_S[index])
        assert own == pytest.approx(mean - sum(others) / 2)


def test_statistics_are_of_trained_tokens_and_of_every_suffix() -> None:
    step = Step.drawn(3)
    stats = stats_of(step.batch)
    for index, (row, mask) in enumerate(zip(step.ratios, step.masks, strict=True)):
        kept = [x for x, trained in zip(row, mask, strict=True) if trained]
        assert int(stats.counts_S[index]) == len(kept)
        assert float(stats.sums_S[index]) == pytest.approx(sum(kept), abs=1e-5)
        peak = max((abs(sum(kept[t:])) for t in range(len(kept))), default=0.0)
        assert float(stats.peaks_S[index]) == pytest.approx(peak, abs=1e-5)


def test_the_batch_s_largest_return_is_1() -> None:
    """So beta does not matter to the policy, up to what keeps a division by 0 away."""
    step = Step.drawn(0)
    stats, group_S, scores_S = stats_of(step.batch), torch.tensor(step.groups), torch.tensor(step.scores)
    member_S = torch.ones(len(scores_S), dtype=torch.bool)
    one, other = (
        centred(stats, group_S, scores_S, member_S, beta=beta, config=replace(PLAIN, process_coef=1.0))
        for beta in (0.05, 5.0)
    )
    assert torch.allclose(one.scales_S, other.scales_S, rtol=1e-4)
    factor = 3 / 2  # of group 1, of whose four responses one is empty
    assert float(other.scales_S[1]) * float(stats.peaks_S.max()) == pytest.approx(factor, rel=1e-4)
    nothing = replace(stats, sums_S=torch.zeros(11).double(), peaks_S=torch.zeros(11).double())
    assert centred(nothing, group_S, scores_S, member_S, beta=0.05, config=PLAIN).scales_S.isfinite().all()


def test_turn_rewards_are_added_as_they_are() -> None:
    step, config = Step.drawn(0), replace(PLAIN, process_coef=0.0, outcome_coef=0.0)
    turns_T = torch.zeros(54)
    turns_T[1] = 3.0
    advantages, _ = by_package(step, config, turn_rewards_T=turns_T)
    assert advantages[0][1] is not None and advantages[0][1] > 1
    assert all(x is None or x < 0 for row in advantages[1:] for x in row)


def test_metrics_of_the_rewards() -> None:
    def of(sums: list[float], outcomes: list[float], groups: list[int], counts: list[int]) -> dict[str, float]:
        stats = ProcessStats(
            sums_S=torch.tensor(sums).double(), counts_S=torch.tensor(counts), peaks_S=torch.zeros(len(sums)).double()
        )
        return process_metrics(stats, torch.tensor(groups), torch.tensor(outcomes), 0.5)

    # Prompt 0: the right one is above one wrong one, below another; prompt 1: equal rewards; the last has no tokens.
    metrics = of([2.0, 1.0, 3.0, 4.0, 4.0, 9.0], [1.0, 0.0, 0.0, 0.0, 1.0, 1.0], [0, 0, 0, 1, 1, 0], [1, 1, 1, 1, 1, 0])
    assert metrics == {"process_reward/reward": pytest.approx(1.4), "process_reward/pair_accuracy": pytest.approx(0.5)}
    # A share of test cases: the pair that differs by 1 counts for four of those that differ by a quarter.
    shares = of([3.0, 2.0, 1.0], [0.0, 0.25, 1.0], [0, 0, 0], [1, 1, 1])
    assert shares["process_reward/pair_accuracy"] == 0.0
    shares = of([1.0, 0.0, 2.0], [0.0, 0.25, 1.0], [0, 0, 0], [1, 1, 1])
    assert shares["process_reward/pair_accuracy"] == pytest.approx((1 + 0.75) / 2)
    assert "process_reward/pair_accuracy" not in of([1.0, 2.0], [1.0, 1.0], [0, 0], [1, 1])
    assert of([1.0], [1.0], [0], [0]) == {}
