"""From scored sequences to what is trained on: KL, rewards of tokens, advantages, correction.  Pure, in float32."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mcore_rl.algorithms.advantages.inputs import AdvantageInputs, Advantages
from mcore_rl.algorithms.advantages.registry import estimate_advantages
from mcore_rl.algorithms.correction import correct
from mcore_rl.algorithms.kl import KlController, penalty
from mcore_rl.algorithms.ragged import exact_sum, sequence_sums, spread
from mcore_rl.algorithms.shaping import mask_truncated
from mcore_rl.config.algorithm import AlgorithmConfig, CorrectionLevel
from mcore_rl.controller.trajectories import Groups
from mcore_rl.types import TrainBatch

# What ``algorithms.correction`` calls its metrics -> what they are called in metrics.jsonl.
AGREEMENT = {
    "logprob_diff_mean": "rollout/logprob_diff_mean",
    "logprob_diff_max": "rollout/logprob_diff_max",
    "kl_k3": "rollout/kl",
}
CORRECTION = {
    "ratio_mean": "rollout/correction_weight_mean",
    "above_upper": "rollout/correction_clip_share",
    "masked": "rollout/correction_masked_share",
}


@dataclass(frozen=True)
class Lesson:
    """batch: complete, for the losses.  metrics: of the whole step."""

    batch: TrainBatch
    metrics: dict[str, float]


def lesson(groups: Groups, batch: TrainBatch, algorithm: AlgorithmConfig, kl: KlController) -> Lesson:
    """``batch`` (old log-probs, and values and reference log-probs where there are some) with what follows from them.

    The KL controller is told of this step's KL after its coefficient was used.
    """
    assert batch.old_logprobs_T is not None and batch.rollout_logprobs_T is not None
    metrics: dict[str, float] = {}
    mask_T = batch.mask_T
    if algorithm.mask_truncated:
        mask_T = mask_truncated(mask_T, batch.lengths_S, groups.truncated_S)
        metrics["dropped/masked_sequences"] = float(groups.truncated_S.sum())
    process_T = None
    if algorithm.use_kl_in_reward:
        assert batch.ref_logprobs_T is not None, "the KL in the reward needs the reference"
        kl_T = penalty(algorithm.kl_penalty)(batch.old_logprobs_T, batch.ref_logprobs_T).masked_fill_(~mask_T, 0)
        mean = float(sequence_sums(kl_T, batch.lengths_S).mean())
        metrics |= {"kl/reward": mean, "kl/coef": kl.coef}
        process_T = kl_T.mul_(-kl.coef)  # where it arises (arXiv:1909.08593, eq. 2)
        kl.update(mean, len(batch.lengths_S))
    inputs = AdvantageInputs(
        lengths_S=batch.lengths_S,
        mask_T=mask_T,
        group_S=groups.group_S,
        outcome_S=groups.scores_S,
        process_T=process_T,
        values_T=batch.old_values_T,
        greedy_S=groups.greedy_S,
    )
    found = estimate_advantages(inputs, algorithm)
    config = algorithm.rollout_correction
    correction = correct(batch.old_logprobs_T, batch.rollout_logprobs_T, inputs.trained, batch.lengths_S, config)
    names = AGREEMENT if config.level is CorrectionLevel.none else AGREEMENT | CORRECTION
    metrics |= {key: correction.metrics[f"rollout_correction/{name}"] for name, key in names.items()}
    if inputs.trained.count:
        metrics |= _trained_metrics(inputs, found)
    complete = replace(
        batch,
        rollout_logprobs_T=None,  # what they are good for is done; no loss reads them
        mask_T=correction.mask_T,
        advantages_T=found.advantages_T,
        returns_T=found.returns_T,
        weights_T=correction.weights_T,
    )
    return Lesson(complete, metrics)


def _trained_metrics(inputs: AdvantageInputs, found: Advantages) -> dict[str, float]:
    trained = inputs.trained
    of_advantages = spread(chunk for (chunk,) in trained.chunks(found.advantages_T))
    metrics = {
        "advantage/mean": of_advantages.mean,
        "advantage/std": of_advantages.variance**0.5,
        "advantage/min": of_advantages.low,
        "advantage/max": of_advantages.high,
    }
    for name, tensor_T in (("return/mean", found.returns_T), ("value/mean", inputs.values_T)):
        if tensor_T is not None:
            metrics[name] = exact_sum(chunk for (chunk,) in trained.chunks(tensor_T)) / trained.count
    return metrics
