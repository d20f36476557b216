"""From scored sequences to what is trained on: KL, rewards, advantages, correction, over all data-parallel ranks.

Ranks do what needs tokens, each for its own sequences (``algorithms/lesson.py``); what spans all of them, groups,
whitening, the KL's coefficient and all metrics, is concluded here from what they say of each sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mcore_rl.algorithms.advantages.registry import Estimate, estimate
from mcore_rl.algorithms.correction import correction_metrics, mean_weight
from mcore_rl.algorithms.kl import KlController
from mcore_rl.algorithms.lesson import Facts
from mcore_rl.config.algorithm import AlgorithmConfig
from mcore_rl.controller.step.batch_assembly import Groups
from mcore_rl.runtime.shared_batch import SharedBatch
from mcore_rl.runtime.worker_group import WorkerGroup

FIELDS = ("tokens_T", "mask_T", "rollout_logprobs_T", "old_logprobs_T", "ref_logprobs_T", "old_values_T")


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """estimate: of the advantages.  trained_S: tokens that are trained.  metrics: of the whole step.

    mean_weight: what importance weights are divided by.  mean_logprob: of a token whose advantage was estimated.
    """

    estimate: Estimate
    trained_S: Tensor
    metrics: dict[str, float]
    mean_weight: float = 1.0
    mean_logprob: float = 0.0


async def study(
    actor: WorkerGroup, shared: SharedBatch, groups: Groups, algorithm: AlgorithmConfig, kl: KlController
) -> Lesson:
    """What follows from old and rollout log-probs, and from values and reference log-probs where there are some.

    What is said of tokens stays with ``shared``: a new mask, raw advantages, returns, weights.
    The KL controller is told of this step's KL after its coefficient was used.
    """
    told = [groups.outcomes.of(home) for home in shared.homes]
    takings = shared.takings([[home] for home in shared.homes], FIELDS, told)
    found, places = await actor.map("learn", takings, algorithm, kl.coef)
    facts, fields = zip(*found, strict=True)
    shared.add(shared.homes, places, fields[0])
    return conclude(shared.in_order(shared.homes, facts), groups, algorithm, kl)


def conclude(facts: Facts, groups: Groups, algorithm: AlgorithmConfig, kl: KlController) -> Lesson:
    """facts: of all sequences, in the order of ``groups``."""
    metrics: dict[str, float] = {}
    if algorithm.mask_truncated:
        metrics["dropped/masked_sequences"] = float(groups.outcomes.truncated_S.sum())
    if facts.kl_S is not None:
        per_response = float(facts.kl_S.mean())
        per_token = float((facts.kl_S / facts.responses_S.clamp(min=1)).mean())
        metrics |= {"kl/reward": per_response, "kl/reward_per_token": per_token, "kl/coef": kl.coef}
        kl.update(per_token=per_token, per_response=per_response, num_samples=len(facts.kl_S))
    estimated = estimate(
        groups.group_S, facts.scores_S, facts.counts_S, facts.advantages, algorithm,
        members_S=facts.members_S, parts_SK=groups.outcomes.parts_SK,
    )  # fmt: skip
    metrics |= correction_metrics(facts.correction, algorithm.rollout_correction)
    if (spread := estimated.spread) is not None:
        metrics |= {
            "advantage/mean": spread.mean,
            "advantage/std": spread.variance**0.5,
            "advantage/min": spread.low,
            "advantage/max": spread.high,
        }
        for name, sums_S in (("return/mean", facts.returns_S), ("value/mean", facts.values_S)):
            if sums_S is not None:
                metrics[name] = float(sums_S.sum()) / spread.count
    return Lesson(
        estimate=estimated,
        trained_S=facts.trained_S,
        metrics=metrics,
        mean_weight=mean_weight(facts.correction, algorithm.rollout_correction),
        mean_logprob=float(facts.logprobs_S.sum()) / max(int(facts.counts_S.sum()), 1),
    )
