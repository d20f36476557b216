"""Importance correction for what sampler and trainer compute differently.

vLLM and Megatron give the same weights slightly different log-probs, so samples come from a policy that is not quite
the one whose gradient is taken.  ``ratio = p_trainer / p_sampler`` puts that right: per token, or as the product over a
response.  Truncated (arXiv:1802.01561) it weighs the loss, at most ``upper``; masked, samples outside of the
bounds are not trained and those inside are weighed.  Log ratios are clamped to +-20 before they are exponentiated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mcore_rl.algorithms.kl import kl_k3
from mcore_rl.algorithms.losses.token_losses import MAX_LOG_RATIO
from mcore_rl.algorithms.ragged import CHUNK, Trained, at_tokens, sequence_counts, sequence_sums
from mcore_rl.config.algorithm import CorrectionLevel, CorrectionMode, RolloutCorrectionConfig

AGREEMENT = ("logprob_diff_mean", "logprob_diff_max", "kl_k3")
WEIGHING = ("ratio_mean", "effective_sample_size", "above_upper", "masked")


@dataclass(frozen=True, kw_only=True)
class Correction:
    """weights_T: what the policy loss of each token is multiplied by, 0 where untrained; None is 1 everywhere.

    mask_T: what is trained.  metrics: of the whole batch, see ``correct``.
    """

    weights_T: Tensor | None
    mask_T: Tensor
    metrics: dict[str, float]


def correct(
    old_logprobs_T: Tensor,
    rollout_logprobs_T: Tensor,
    trained: Trained,
    lengths_S: Sequence[int],
    config: RolloutCorrectionConfig,
) -> Correction:
    """Weights and mask from the trainer's (old) and the sampler's (rollout) log-probs of the same weights.

    Estimate advantages with the mask that was given, and train with the one that comes back: a response whose
    last token is masked here keeps its score.  Bounds are inclusive; a ratio that is not a number is outside.

    Metrics, each a number for the batch, 0 where nothing is trained.  Over trained tokens, at every level:
    ``rollout_correction/logprob_diff_mean`` and ``_max`` (absolute, nats) and ``kl_k3`` (KL(sampler || trainer), nats).
    At level token over tokens, at level sequence over responses, before truncation: ``ratio_mean``,
    ``effective_sample_size`` (``(sum w)^2 / (n sum w^2)``, 1 is all of them), ``above_upper``.  And
    ``masked``, the share of trained tokens that masking took away.
    """
    if config.level is CorrectionLevel.none:
        return _correction(None, trained.mask_T, _agreement(trained, old_logprobs_T, rollout_logprobs_T, None))
    unit_ratio = old_logprobs_T.new_empty(trained.count)  # a unit is a token or a response; their log ratios first
    metrics = _agreement(trained, old_logprobs_T, rollout_logprobs_T, unit_ratio) | dict.fromkeys(WEIGHING, 0.0)
    counts_S = torch.empty(0)
    if config.level is CorrectionLevel.sequence:
        counts_S = sequence_counts(trained.mask_T, lengths_S)
        unit_ratio = sequence_sums(unit_ratio, counts_S)[counts_S > 0]
    unit_ratio.clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp_()  # in the memory of the log ratios
    if trained.count:
        metrics |= _unit_metrics(unit_ratio, config.upper)

    ratio_M, trained_T = unit_ratio, trained.mask_T
    if config.level is CorrectionLevel.sequence:
        ratio_M = at_tokens(unit_ratio, counts_S[counts_S > 0].tolist())
    if config.mode is CorrectionMode.mask:
        outside_M = ~((config.lower <= ratio_M) & (ratio_M <= config.upper))
        ratio_M.masked_fill_(outside_M, 0)
        trained_T = trained.scatter(~outside_M)
        metrics["masked"] = int(np.count_nonzero(outside_M.numpy())) / max(trained.count, 1)
    return _correction(trained.scatter(ratio_M.clamp_(max=config.upper)), trained_T, metrics)


def _correction(weights_T: Tensor | None, mask_T: Tensor, metrics: dict[str, float]) -> Correction:
    named = {f"rollout_correction/{name}": value for name, value in metrics.items()}
    return Correction(weights_T=weights_T, mask_T=mask_T, metrics=named)


def _agreement(
    trained: Trained, old_logprobs_T: Tensor, rollout_logprobs_T: Tensor, log_ratio_M: Tensor | None
) -> dict[str, float]:
    """Metrics of the trained tokens' log ratios, which are written to ``log_ratio_M`` where that is wanted."""
    zero, found, start = old_logprobs_T.new_zeros(()), [], 0
    for old, rollout in trained.chunks(old_logprobs_T, rollout_logprobs_T):
        log_ratio = old - rollout
        if log_ratio_M is not None:
            log_ratio_M[start : start + len(log_ratio)] = log_ratio
            start += len(log_ratio)
        clamped = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        difference = log_ratio.abs_()
        found.append(torch.stack([difference.sum(), kl_k3(zero, clamped).sum(), difference.max()]).double())
    if not found:
        return dict.fromkeys(AGREEMENT, 0.0)
    found_C3 = torch.stack(found)
    difference_sum, k3, _ = found_C3.sum(0).tolist()
    return {
        "logprob_diff_mean": difference_sum / trained.count,
        "logprob_diff_max": float(found_C3[:, 2].max()),
        "kl_k3": k3 / trained.count,
    }


def _unit_metrics(ratio: Tensor, upper: float) -> dict[str, float]:
    """Sums in float64: squares of what 20 nats allow span 34 digits."""
    found = []
    for part in torch.split(ratio, CHUNK):
        exact = part.double()
        found.append(torch.stack([exact.sum(), exact.dot(exact), (part > upper).sum()]))
    total, squares, above = torch.stack(found).sum(0).tolist()
    return {
        "ratio_mean": total / len(ratio),
        "effective_sample_size": total**2 / (len(ratio) * squares),
        "above_upper": above / len(ratio),
    }
