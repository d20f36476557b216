"""Estimates a step's advantages from its scored sequences: KL, rewards, advantages, correction, over all ranks.

Ranks compute what needs tokens, each for its own sequences (``algorithms/token_advantages.py``).  What spans all of
them is computed here, from the statistics of each sequence: groups, whitening, the KL's coefficient and all metrics.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mcore_rl.algorithms.advantages.estimation import BatchAdvantages, estimate
from mcore_rl.algorithms.advantages.ragged import Spreads, sequence_counts
from mcore_rl.algorithms.correction import correction_metrics, mean_weight
from mcore_rl.algorithms.kl import KlController
from mcore_rl.algorithms.step_batch import StepBatch
from mcore_rl.algorithms.token_advantages import TEACHER_LOGPROBS, Outcomes, SequenceStats, estimate_tokens
from mcore_rl.config.algorithm import AlgorithmConfig
from mcore_rl.config.stages import TOKEN_REWARDS
from mcore_rl.ground.types import TAUGHT_BY
from mcore_rl.runtime.shared_batch import SharedBatch
from mcore_rl.runtime.train_group import TrainGroup

FIELDS = (
    "tokens_T",
    "mask_T",
    "rollout_logprobs_T",
    "turn_rewards_T",
    "old_logprobs_T",
    "ref_logprobs_T",
    TEACHER_LOGPROBS,
    "old_values_T",
    TOKEN_REWARDS,
)


@dataclass(frozen=True, kw_only=True)
class StepAdvantages:
    """What the updates of a step need of the estimation.

    advantages: the advantage of each sequence, or how those of tokens are whitened.
    trained_S: trained tokens of each sequence, int64.
    metrics: of the whole step.
    mean_advantage: over the tokens whose advantages are estimated, a teacher's part included; 0 if there are none.
    mean_weight: the divisor of importance weights.
    mean_logprob: the mean old log-prob of the tokens whose advantages are estimated, nats; 0 without old log-probs.
    """

    advantages: BatchAdvantages
    trained_S: Tensor
    metrics: dict[str, float]
    mean_advantage: float = 0.0
    mean_weight: float = 1.0
    mean_logprob: float = 0.0

    @classmethod
    def without(cls, groups: StepBatch) -> StepAdvantages:
        """For the updates of a role that are taken before there are advantages."""
        nothing = BatchAdvantages(advantages_S=None, whitening=None, spread=None)
        batch = groups.batch
        return cls(advantages=nothing, trained_S=sequence_counts(batch.mask_T, batch.lengths_S), metrics={})


async def estimate_step(
    policy: TrainGroup,
    shared: SharedBatch,
    groups: StepBatch,
    outcomes: Outcomes,
    algorithm: AlgorithmConfig,
    kl: KlController,
) -> StepAdvantages:
    """Estimates the advantages of a step from its log-probs and values.

    Adds the results per token to ``shared``: a new mask, raw advantages, returns, weights.  Uses the coefficient of
    ``kl``, then updates it with this step's KL.  outcomes: of the sequences, as they are rewarded.
    """
    ranks = shared.assignment
    inputs = shared.shard_refs([[each] for each in ranks], FIELDS, [outcomes.of(each) for each in ranks])
    made, shards = await policy.on_ranks(inputs, estimate_tokens, algorithm, kl.coef)
    shared.add(ranks, shards, made[0]["fields"])
    return combine(shared.in_order(ranks, [each["stats"] for each in made]), groups, algorithm, kl)


def combine(stats: SequenceStats, groups: StepBatch, algorithm: AlgorithmConfig, kl: KlController) -> StepAdvantages:
    """The advantages of a step from ``stats`` of all its sequences, in the order of ``groups``; updates ``kl``."""
    metrics: dict[str, float] = {}
    if algorithm.mask_truncated:
        metrics["dropped/masked_sequences"] = float(groups.outcomes.truncated_S.sum())
    if stats.kl_S is not None:
        per_response = float(stats.kl_S.mean())
        per_token = float((stats.kl_S / stats.responses_S.clamp(min=1)).mean())
        metrics |= {"kl/reward": per_response, "kl/reward_per_token": per_token, "kl/coef": kl.coef}
        kl.update(per_token=per_token, per_response=per_response, num_samples=len(stats.kl_S))
    estimated = _estimated(stats, groups, algorithm)
    correction = stats.correction
    config = algorithm.rollout_correction
    if correction is not None:
        metrics |= correction_metrics(correction, config, weighs=algorithm.weighs)
    mean_advantage = 0.0
    if (spread := estimated.spread) is not None:
        mean_advantage = spread.mean
        metrics |= {
            "advantage/mean": spread.mean,
            "advantage/std": spread.variance**0.5,
            "advantage/min": spread.low,
            "advantage/max": spread.high,
        }
        for name, sums_S in (("return/mean", stats.returns_S), ("value/mean", stats.values_S)):
            if sums_S is not None:
                metrics[name] = float(sums_S.sum()) / spread.count
    if stats.reverse_kl is not None and (distance := stats.reverse_kl.total()) is not None:
        mean_advantage -= algorithm.distill.coef * distance.mean
        metrics |= {
            "distill/reverse_kl": distance.mean,
            "distill/reverse_kl_std": distance.variance**0.5,
            "distill/reverse_kl_max": distance.high,
            **_distances(stats.reverse_kl, groups),
        }
    return StepAdvantages(
        advantages=estimated,
        trained_S=stats.trained_S,
        metrics=metrics,
        mean_advantage=mean_advantage,
        mean_weight=1.0 if correction is None else mean_weight(correction, config),
        mean_logprob=0.0
        if stats.logprobs_S is None
        else float(stats.logprobs_S.sum()) / max(int(stats.counts_S.sum()), 1),
    )


def _distances(distances: Spreads, groups: StepBatch) -> dict[str, float]:
    """The mean distance from each of several teachers."""
    if not groups.taught_by:
        return {}
    name_S = groups.batch.extra_S[TAUGHT_BY]
    of_names = [(name, distances.of_sequences(name_S == number)) for number, name in enumerate(groups.taught_by)]
    totals = {name: chosen.total() for name, chosen in of_names}
    return {f"distill/reverse_kl/{name}": total.mean for name, total in totals.items() if total is not None}


def _estimated(stats: SequenceStats, groups: StepBatch, algorithm: AlgorithmConfig) -> BatchAdvantages:
    """The advantages of all sequences.  A sample of several sequences counts once in its group, and all have its own.

    Its score is the episode's once, with the other rewards of all its tokens; its tokens are those of all.
    """
    outcomes = groups.outcomes
    sample_S = groups.sample_S
    if sample_S is None:
        return estimate(
            groups.group_S,
            stats.scores_S,
            stats.counts_S,
            stats.advantages,
            algorithm,
            members_S=stats.members_S,
            parts_SK=outcomes.parts_SK,
        )
    count = int(sample_S[-1]) + 1

    def sums(x_S: Tensor) -> Tensor:
        return torch.zeros(count, dtype=x_S.dtype).index_add(0, sample_S, x_S)

    firsts = torch.ones_like(sample_S, dtype=torch.bool)
    firsts[1:] = sample_S[1:] != sample_S[:-1]
    scored_S = stats.members_S > 0  # only where a token could have earned it is the outcome among the rewards
    own_S = stats.scores_S - torch.where(scored_S, outcomes.scores_S, 0)
    members_N = sums(stats.members_S)
    scores_N = sums(own_S) + torch.where(members_N > 0, outcomes.scores_S[firsts], 0)
    of_samples = estimate(
        groups.group_S[firsts],
        scores_N,
        sums(stats.counts_S),
        stats.advantages,
        algorithm,
        members_S=members_N,
        parts_SK=None if outcomes.parts_SK is None else outcomes.parts_SK[firsts],
    )
    if of_samples.advantages_S is None:
        return of_samples
    return replace(of_samples, advantages_S=of_samples.advantages_S[sample_S])
