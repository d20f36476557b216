"""Importance correction for what sampler and trainer compute differently.

vLLM and Megatron give the same weights slightly different log-probs, so samples come from a policy that is not quite
the one whose gradient is taken.  ``ratio = p_trainer / p_sampler`` puts that right: per token, or as the product over a
response.  Truncated (arXiv:1802.01561) it weighs the loss, at most ``upper``; masked, samples outside of the
bounds are not trained and those inside are weighed.  Log ratios are clamped to +-20 before they are exponentiated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_rl.algorithms.kl import kl_k1, kl_k3
from mcore_rl.algorithms.losses.token_losses import MAX_LOG_RATIO
from mcore_rl.algorithms.ragged import at_tokens, sequence_counts, sequence_sums
from mcore_rl.config.algorithm import CorrectionLevel, CorrectionMode, RolloutCorrectionConfig

METRICS = (
    "logprob_diff_mean", "logprob_diff_max", "kl_k1", "kl_k3", "ratio_mean", "effective_sample_size", "above_upper",
    "masked",
)  # fmt: skip


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
    mask_T: Tensor,
    lengths_S: Sequence[int],
    config: RolloutCorrectionConfig,
) -> Correction:
    """Weights and mask from the trainer's (old) and the sampler's (rollout) log-probs of the same weights.

    Estimate advantages with the ``mask_T`` that was given, and train with the one that comes back: a response whose
    last token is masked here keeps its score.  Bounds are inclusive; a ratio that is not a number is outside.

    Metrics, each a number for the batch, 0 where nothing is trained.  Over trained tokens, at every level:
    ``rollout_correction/logprob_diff_mean`` and ``_max`` (absolute, nats), ``kl_k1`` and ``kl_k3`` (KL(sampler ||
    trainer), nats).  Over tokens, or over responses at level sequence, before truncation: ``ratio_mean``,
    ``effective_sample_size`` (``(sum w)^2 / (n sum w^2)``, 1 is all of them), ``above_upper``.  And
    ``masked``, the share of trained tokens that masking took away.
    """
    log_ratio_T = (old_logprobs_T - rollout_logprobs_T).masked_fill_(~mask_T, 0)
    unit_trained, unit_log_ratio = mask_T, log_ratio_T  # a unit is a token or a response
    if config.level is CorrectionLevel.sequence:
        unit_trained = sequence_counts(mask_T, lengths_S) > 0
        unit_log_ratio = sequence_sums(log_ratio_T, lengths_S)
    unit_ratio = unit_log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp_().masked_fill_(~unit_trained, 0)

    weights_T, trained_T = None, mask_T
    if config.level is not CorrectionLevel.none:
        ratio_T = at_tokens(unit_ratio, lengths_S) if config.level is CorrectionLevel.sequence else unit_ratio
        if config.mode is CorrectionMode.mask:
            trained_T = mask_T & (config.lower <= ratio_T) & (ratio_T <= config.upper)
        weights_T = ratio_T.clamp(max=config.upper).masked_fill_(~trained_T, 0)

    num_tokens, num_units = int(mask_T.sum()), int(unit_trained.sum())
    metrics = dict.fromkeys(METRICS, 0.0)
    if num_tokens:
        metrics |= _token_metrics(log_ratio_T, num_tokens) | _unit_metrics(unit_ratio, num_units, config.upper)
        metrics["masked"] = 1 - int(trained_T.sum()) / num_tokens
    named = {f"rollout_correction/{name}": value for name, value in metrics.items()}
    return Correction(weights_T=weights_T, mask_T=trained_T, metrics=named)


def _token_metrics(log_ratio_T: Tensor, count: int) -> dict[str, float]:
    """Of log ratios that are 0 where untrained, so that they add nothing there."""
    difference_T = log_ratio_T.abs()
    clamped_T = log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    zero = log_ratio_T.new_zeros(())
    return {
        "logprob_diff_mean": float(difference_T.sum()) / count,
        "logprob_diff_max": float(difference_T.max()),
        "kl_k1": float(kl_k1(zero, clamped_T).sum()) / count,
        "kl_k3": float(kl_k3(zero, clamped_T).sum()) / count,
    }


def _unit_metrics(ratio: Tensor, count: int, upper: float) -> dict[str, float]:
    """Of ratios that are 0 where untrained.  Sums in float64: squares of what 20 nats allow span 34 digits."""
    total = float(ratio.sum(dtype=torch.float64))
    squares = float(ratio.square().sum(dtype=torch.float64))
    return {
        "ratio_mean": total / count,
        "effective_sample_size": total**2 / (count * squares),
        "above_upper": int((ratio > upper).sum()) / count,
    }
