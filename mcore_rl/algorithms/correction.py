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

from mcore_rl.algorithms.kl import kl_k3
from mcore_rl.algorithms.losses.token_losses import MAX_LOG_RATIO
from mcore_rl.algorithms.ragged import Trained, at_tokens, sequence_counts, sequence_sums
from mcore_rl.config.algorithm import CorrectionLevel, CorrectionMode, RolloutCorrectionConfig
from mcore_rl.types import SentAsArrays


@dataclass(frozen=True, kw_only=True)
class CorrectionSums(SentAsArrays):
    """What each sequence adds to the metrics, float64 [S].

    Over its trained tokens: their number, sum and maximum of the absolute difference of the log-probs, sum of k3.  Over
    its units, which are tokens, or the response as a whole, or none: their number, sums of the ratio and of its square,
    how many are above the upper bound.  masked_S: trained tokens that masking took away.
    """

    counts_S: Tensor
    differences_S: Tensor
    highest_S: Tensor
    k3_S: Tensor
    units_S: Tensor
    ratios_S: Tensor
    squares_S: Tensor
    above_S: Tensor
    masked_S: Tensor


@dataclass(frozen=True, kw_only=True)
class Correction:
    """weights_T: what the policy loss of each token is multiplied by, 0 where untrained; None is 1 everywhere.

    mask_T: what is trained.  sums: for ``correction_metrics``.
    """

    weights_T: Tensor | None
    mask_T: Tensor
    sums: CorrectionSums


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
    Any sequences: none depends on another.
    """
    counts_S = sequence_counts(trained.mask_T, lengths_S)
    log_ratio_M = trained.gather(old_logprobs_T).double() - trained.gather(rollout_logprobs_T).double()
    agreement = _agreement(log_ratio_M, counts_S)
    if config.level is CorrectionLevel.none:
        nothing_S = torch.zeros(len(counts_S), dtype=torch.float64)
        sums = CorrectionSums(
            **agreement, units_S=nothing_S, ratios_S=nothing_S, squares_S=nothing_S, above_S=nothing_S,
            masked_S=nothing_S,
        )  # fmt: skip
        return Correction(weights_T=None, mask_T=trained.mask_T, sums=sums)

    # A unit is a token or a response; each has one ratio.
    units_S, log_ratio_U = counts_S, log_ratio_M
    if config.level is CorrectionLevel.sequence:
        units_S, log_ratio_U = (counts_S > 0).long(), sequence_sums(log_ratio_M, counts_S)[counts_S > 0]
    ratio_U = log_ratio_U.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    ratio_M = ratio_U
    if config.level is CorrectionLevel.sequence:
        ratio_M = at_tokens(ratio_U, counts_S[counts_S > 0].tolist())
    outside_M = torch.zeros_like(ratio_M, dtype=torch.bool)
    if config.mode is CorrectionMode.mask:
        outside_M = ~((config.lower <= ratio_M) & (ratio_M <= config.upper))
    sums = CorrectionSums(
        **agreement,
        units_S=units_S.double(),
        ratios_S=sequence_sums(ratio_U, units_S),
        squares_S=sequence_sums(ratio_U.square(), units_S),
        above_S=sequence_sums((ratio_U > config.upper).double(), units_S),
        masked_S=sequence_sums(outside_M.double(), counts_S),
    )
    weights_M = ratio_M.masked_fill(outside_M, 0).clamp(max=config.upper).to(old_logprobs_T.dtype)
    return Correction(weights_T=trained.scatter(weights_M), mask_T=trained.scatter(~outside_M), sums=sums)


def _agreement(log_ratio_M: Tensor, counts_S: Tensor) -> dict[str, Tensor]:
    difference_M = log_ratio_M.abs()
    k3_M = kl_k3(torch.zeros(()), log_ratio_M.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    highest_S = torch.segment_reduce(difference_M, "max", lengths=counts_S, unsafe=True)
    return {
        "counts_S": counts_S.double(),
        "differences_S": sequence_sums(difference_M, counts_S),
        "highest_S": highest_S.where(counts_S > 0, 0),
        "k3_S": sequence_sums(k3_M, counts_S),
    }


def correction_metrics(sums: CorrectionSums, config: RolloutCorrectionConfig) -> dict[str, float]:
    """Numbers for the whole batch, 0 where nothing is trained.

    Over trained tokens, at every level: ``rollout_correction/logprob_diff_mean`` and ``_max`` (absolute, nats) and
    ``kl_k3`` (KL(sampler || trainer), nats).  At level token over tokens, at level sequence over responses, before
    truncation: ``ratio_mean``, ``effective_sample_size`` (``(sum w)^2 / (n sum w^2)``, 1 is all of them),
    ``above_upper``.  And ``masked``, the share of trained tokens that masking took away.
    """
    count, units = max(float(sums.counts_S.sum()), 1.0), max(float(sums.units_S.sum()), 1.0)
    found = {
        "logprob_diff_mean": float(sums.differences_S.sum()) / count,
        "logprob_diff_max": float(sums.highest_S.max()),
        "kl_k3": float(sums.k3_S.sum()) / count,
    }
    if config.level is not CorrectionLevel.none:
        total, squares = float(sums.ratios_S.sum()), float(sums.squares_S.sum())
        found |= {
            "ratio_mean": total / units,
            "effective_sample_size": total**2 / (units * squares) if squares else 0.0,
            "above_upper": float(sums.above_S.sum()) / units,
            "masked": float(sums.masked_S.sum()) / count,
        }
    return {f"rollout_correction/{name}": value for name, value in found.items()}
