"""Process rewards of an implicit reward model, compared within each group (PRIME, arXiv:2502.01456).

The process reward of a token is ``beta (log pi - log pi_ref)`` of the reward model and its frozen reference.  Ranks
have tokens, and the controller has groups: ranks first summarize each response (``process_stats``), the controller
computes what is subtracted (``compare``), and ranks subtract it (``token_rewards``).  ``config/algorithms/prime.py``
names these stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mcore_rl.algorithms.advantages.groups import PromptGroups
from mcore_rl.algorithms.advantages.ragged import (
    Spreads,
    Trained,
    at_tokens,
    discounted_sums,
    sequence_counts,
    sequence_sums,
)
from mcore_rl.algorithms.advantages.rloo import rloo
from mcore_rl.config.algorithms.prime import PROCESS_REWARD, PrimeConfig, ProcessNorm, ProcessRewardConfig
from mcore_rl.config.stages import OUTCOME, OUTCOMES, TOKEN_REWARDS
from mcore_rl.ground.types import SentAsArrays, TrainBatch

if TYPE_CHECKING:
    from mcore_rl.algorithms.step_batch import StepBatch
    from mcore_rl.config.run import RunConfig

LOGPROBS = "process_logprobs_T"
REF_LOGPROBS = "process_ref_logprobs_T"
EPSILON = 1e-6  # added to the largest return, as in PRIME's code


@dataclass(frozen=True, kw_only=True)
class ProcessStats(SentAsArrays):
    """Of each response: its log-ratios of the reward model to its reference, nats.

    sums_S: their sum over the trained tokens, float64.  counts_S: these tokens, int64.
    peaks_S: the largest absolute value of a sum from a trained token to the last, float64; 0 without trained tokens.
    """

    sums_S: Tensor
    counts_S: Tensor
    peaks_S: Tensor


def _log_ratios(batch: TrainBatch) -> Tensor:
    """[T], meaningful at trained tokens."""
    return batch.extra_T[LOGPROBS] - batch.extra_T[REF_LOGPROBS]


def process_stats(batch: TrainBatch, values: Mapping[str, Any], run: RunConfig) -> dict[str, ProcessStats]:
    """The first stage of the ranks: ``stats_of``."""
    return {"process_stats": stats_of(batch)}


def stats_of(batch: TrainBatch) -> ProcessStats:
    """The statistics of the sequences of ``batch``, which has the log-probs of reward model and reference."""
    counts_S = sequence_counts(batch.mask_T, batch.lengths_S)
    ratios_M = Trained(batch.mask_T).gather(_log_ratios(batch)).double()
    returns = Spreads.of(discounted_sums(ratios_M, counts_S, 1.0), counts_S)
    peaks_S = torch.maximum(returns.highs_S, -returns.lows_S)
    return ProcessStats(sums_S=sequence_sums(ratios_M, counts_S), counts_S=counts_S, peaks_S=peaks_S)


@dataclass(frozen=True, kw_only=True)
class CentredRewards:
    """How the rewards of each response follow from its log-ratios, once they are compared within its group; float32.

    scales_S, shifts_S: the process reward of a token is ``scale * log-ratio - shift``.
    outcomes_S: the reward of the last trained token beside that.
    compared_S: bool, whether the response has siblings; one without has no rewards.
    """

    scales_S: Tensor
    shifts_S: Tensor
    outcomes_S: Tensor
    compared_S: Tensor


def centred(
    stats: ProcessStats,
    group_S: Tensor,
    outcomes_S: Tensor,
    member_S: Tensor,
    *,
    beta: float,
    config: PrimeConfig,
) -> CentredRewards:
    """Leave-one-out of process rewards and of outcomes, each by itself, for all responses of a step.

    With n members in the group, the process reward ``r_t`` of a token becomes ``n / (n - 1) (r_t - b)``, where ``b`` is
    the mean over members of their mean process reward: of a response's mean, that is the mean of the others
    subtracted.  So do PRIME's code and verl's recipe; the paper subtracts the others' mean from ``r_t`` itself,
    unscaled, which differs by ``(r_t - its response's mean) / (n - 1)``.

    stats: of all responses of the step.  group_S: the prompt of each.  outcomes_S: its score.
    member_S: bool, whether it may be a member of its group; those without a trained token are not.
    """
    counts_S = torch.where(member_S, stats.counts_S, 0)
    norm = beta
    if config.process_norm is ProcessNorm.batch:
        norm /= beta * float(torch.where(counts_S > 0, stats.peaks_S, 0).max()) + EPSILON
    means_S = norm * stats.sums_S / stats.counts_S.clamp(min=1)
    groups = PromptGroups.of(group_S, means_S, counts_S)
    factor_S = torch.where(groups.has_siblings_S, groups.sizes_S / (groups.sizes_S - 1).clamp(min=1), 0).double()
    baselines_S = groups.sums(means_S) / groups.sizes_S.clamp(min=1)
    process_S = config.process_coef * factor_S
    return CentredRewards(
        scales_S=(process_S * norm).float(),
        shifts_S=(process_S * baselines_S).float(),
        outcomes_S=(config.outcome_coef * rloo(groups.by(outcomes_S.double()), config)).float(),
        compared_S=groups.has_siblings_S,
    )


def compare(values: Mapping[str, Any], groups: StepBatch, run: RunConfig) -> tuple[dict[str, Any], dict[str, float]]:
    """The stage of the controller: what is subtracted from the rewards of each response, and metrics."""
    assert groups.sample_S is None, "preparation has refused programs"
    algorithm = run.algorithm
    config = run.role_config(PROCESS_REWARD)
    stats = values["process_stats"]
    assert isinstance(config, ProcessRewardConfig) and isinstance(algorithm, PrimeConfig)
    beta = config.beta
    outcomes = groups.outcomes
    member_S = torch.ones_like(outcomes.truncated_S)
    if algorithm.mask_truncated and not algorithm.masked_in_baseline:
        member_S = ~outcomes.truncated_S
    rewards = centred(stats, groups.group_S, outcomes.scores_S, member_S, beta=beta, config=algorithm)
    made = {
        "process_scales": rewards.scales_S,
        "process_shifts": rewards.shifts_S,
        OUTCOMES: replace(outcomes, scores_S=rewards.outcomes_S, compared_S=rewards.compared_S),
    }
    return made, process_metrics(stats, groups.group_S, groups.batch.extra_S[OUTCOME], beta)


def token_rewards(batch: TrainBatch, values: Mapping[str, Tensor], run: RunConfig) -> dict[str, Tensor]:
    """The process rewards of the tokens of ``batch`` after ``compare``, [T], meaningful at trained tokens."""
    scales_T, shifts_T = (at_tokens(values[f"process_{name}"], batch.lengths_S) for name in ("scales", "shifts"))
    return {TOKEN_REWARDS: scales_T * _log_ratios(batch) - shifts_T}


def process_metrics(stats: ProcessStats, group_S: Tensor, outcome_S: Tensor, beta: float) -> dict[str, float]:
    """The mean reward of a response, and how often the better of two responses to a prompt has the higher reward.

    Both are of the log-probs that reward the policy.  outcome_S: in [0, 1].  A pair counts by the difference of its
    outcomes, and half where its rewards are equal; the metric is left out if no two outcomes of a prompt differ.
    """
    there_S = stats.counts_S > 0
    rewards_S = beta * stats.sums_S
    metrics = {"process_reward/reward": float(rewards_S[there_S].mean())} if bool(there_S.any()) else {}
    right = total = 0.0
    for group in torch.unique(group_S[there_S]):
        members_S = there_S & (group_S == group)
        better_PP = outcome_S[members_S][:, None] - outcome_S[members_S][None, :]
        weight_PP = better_PP.clamp(min=0).double()
        higher_PP = (rewards_S[members_S][:, None] - rewards_S[members_S][None, :]).sign()
        right += float((weight_PP * (1 + higher_PP) / 2).sum())
        total += float(weight_PP.sum())
    return metrics | ({"process_reward/pair_accuracy": right / total} if total else {})
