"""Importance correction of samples that the policy before the step did not draw.

Those of an asynchronous run come from older weights; and with the same weights, vLLM and Megatron compute slightly
different log-probs.  The ratio ``r = old / mu`` of trainer to sampler, per token, as the product over a response or as
its geometric mean, corrects this in two ways, which may be combined.  Weights multiply the loss of a token: the ratio,
truncated (arXiv:1802.01561), set to 0 outside of the bounds (IcePop, arXiv:2510.18855), or the token is not trained
there.  Rejection removes tokens or whole responses from training, by an estimate of the distance between the two
policies (Liu, Li et al., 2025, "When Speed Kills Stability", https://richardli.xyz/rl-collapse; verl's
rollout_corr_helper, 0.9.1).  Log ratios are clamped to +-20.  Neither has a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log

import torch
from torch import Tensor

from mcore_rl.algorithms.advantages.ragged import Trained, at_tokens, sequence_counts, sequence_sums
from mcore_rl.algorithms.kl import kl_k3
from mcore_rl.algorithms.losses.token_losses import MAX_LOG_RATIO
from mcore_rl.config.algorithm import CorrectionLevel, CorrectionMode, Rejection, RolloutCorrectionConfig
from mcore_rl.ground.types import NOT_DRAWN, SentAsArrays

MEASURE = RolloutCorrectionConfig()  # ratios of tokens


@dataclass(frozen=True, kw_only=True)
class CorrectionSums(SentAsArrays):
    """What each sequence contributes to the metrics and to the mean weight, float64 [S].

    Over its trained tokens:
    counts_S: their number.
    differences_S, highest_S: sum and maximum of the absolute difference of the log-probs, nats.
    k1_S, k3_S: sums of the estimates k1 and k3 of KL(sampler || trainer), nats.
    masked_S: how many of them are not in the loss: rejected, or outside of the bounds.

    Over its units, the things that have one ratio each: tokens, or the response as a whole (``level``); tokens where
    nothing is weighed:
    units_S: their number.
    ratios_S, squares_S, largest_S, smallest_S: sum, sum of squares, maximum and minimum of the ratio; the extremes are
    0 and inf where there is no unit.
    above_S: how many ratios exceed the upper bound.
    weights_S, weighed_S: sum of the weights, and the number of units that have one.
    """

    counts_S: Tensor
    differences_S: Tensor
    highest_S: Tensor
    k1_S: Tensor
    k3_S: Tensor
    units_S: Tensor
    ratios_S: Tensor
    squares_S: Tensor
    largest_S: Tensor
    smallest_S: Tensor
    above_S: Tensor
    weights_S: Tensor
    weighed_S: Tensor
    masked_S: Tensor


@dataclass(frozen=True, kw_only=True)
class Correction:
    """What ``correct`` gives to some sequences.

    weights_T: the factor of each token's policy loss, 0 at untrained tokens; None is 1 everywhere.
    mask_T: bool, the tokens that are still trained.
    sums: for ``correction_metrics`` and ``mean_weight``.
    """

    weights_T: Tensor | None
    mask_T: Tensor
    sums: CorrectionSums


def drawn_tokens(trained: Trained, rollout_logprobs_T: Tensor) -> Trained:
    """Those of ``trained`` that the sampler drew, and not those of a data set's answer (``NOT_DRAWN``)."""
    strange_T = (rollout_logprobs_T == NOT_DRAWN) & trained.mask_T
    return Trained(trained.mask_T & ~strange_T) if bool(strange_T.any()) else trained


def correct(
    old_logprobs_T: Tensor,
    rollout_logprobs_T: Tensor,
    trained: Trained,
    lengths_S: Sequence[int],
    config: RolloutCorrectionConfig,
    *,
    weighs: bool,
) -> Correction:
    """Weights, with ``weighs``, and mask from the trainer's (old) and the sampler's (rollout) log-probs.

    Estimate advantages with the given mask, and train with the returned one, so that a response whose last token is
    masked here keeps its score.  Bounds are inclusive; a ratio that is NaN is outside, and has the weight 0 in every
    mode.  Equal log-probs have the ratio 1, both -inf too.

    The sequences may be any of a step, since none depends on another; therefore the weights are not yet divided by
    ``mean_weight``.
    """
    counts_S = sequence_counts(trained.mask_T, lengths_S)
    old_M, rollout_M = (trained.gather(logprobs_T).double() for logprobs_T in (old_logprobs_T, rollout_logprobs_T))
    log_ratio_M = torch.where(old_M == rollout_M, 0, old_M - rollout_M)
    weights_M, outside_M, of_units = _weights(log_ratio_M, counts_S, config if weighs else MEASURE)
    rejected_M = _rejected(log_ratio_M, counts_S, config)
    leaves_M = rejected_M | outside_M if config.mode is CorrectionMode.mask else rejected_M
    sums = CorrectionSums(
        **_agreement(log_ratio_M, counts_S),
        **of_units,
        masked_S=sequence_sums((rejected_M | outside_M).double(), counts_S),
    )
    weights_T = None
    if weighs:
        weights_T = trained.scatter(weights_M.masked_fill(leaves_M, 0).to(old_logprobs_T.dtype))
    mask_T = trained.scatter(~leaves_M) if bool(leaves_M.any()) else trained.mask_T
    return Correction(weights_T=weights_T, mask_T=mask_T, sums=sums)


def _weights(
    log_ratio_M: Tensor, counts_S: Tensor, config: RolloutCorrectionConfig
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(weights of tokens [M], bool [M]: outside of the bounds, the sums over units of ``CorrectionSums`` by name)."""
    present_S = counts_S > 0
    of_responses = LEVELS[config.level]
    units_S = counts_S
    log_ratio_U = log_ratio_M
    if of_responses is not None:
        units_S = present_S.long()
        log_ratio_U = of_responses(log_ratio_M, counts_S)[present_S]
    ratio_U = log_ratio_U.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    inside_U = ~ratio_U.isnan()
    if config.mode is not CorrectionMode.truncate:
        inside_U = (config.lower <= ratio_U) & (ratio_U <= config.upper)
    ratio_U = ratio_U.nan_to_num(0)
    weight_U = ratio_U.masked_fill(~inside_U, 0).clamp(max=config.upper)
    weighed_U = inside_U.double() if config.mode is CorrectionMode.mask else torch.ones_like(ratio_U)
    of_units = {
        "units_S": units_S.double(),
        "ratios_S": sequence_sums(ratio_U, units_S),
        "squares_S": sequence_sums(ratio_U.square(), units_S),
        "largest_S": torch.segment_reduce(ratio_U, "max", lengths=units_S, unsafe=True).where(present_S, 0),
        "smallest_S": torch.segment_reduce(ratio_U, "min", lengths=units_S, unsafe=True).where(present_S, torch.inf),
        "above_S": sequence_sums((ratio_U > config.upper).double(), units_S),
        "weights_S": sequence_sums(weight_U, units_S),
        "weighed_S": sequence_sums(weighed_U, units_S),
    }
    weight_M = weight_U
    inside_M = inside_U
    if of_responses is not None:
        lengths = counts_S[present_S].tolist()
        weight_M = at_tokens(weight_U, lengths)
        inside_M = at_tokens(inside_U, lengths)
    return weight_M, ~inside_M, of_units


def _k1(log_ratio: Tensor) -> Tensor:
    return log_ratio


def _k2(log_ratio: Tensor) -> Tensor:
    return 0.5 * log_ratio.square()


def _k3(log_ratio: Tensor) -> Tensor:
    return log_ratio.exp() - 1 - log_ratio


def _mean(x_M: Tensor, counts_S: Tensor) -> Tensor:
    return sequence_sums(x_M, counts_S) / counts_S.clamp(min=1)


def _largest(x_M: Tensor, counts_S: Tensor) -> Tensor:
    return torch.segment_reduce(x_M, "max", lengths=counts_S, unsafe=True).where(counts_S > 0, 0)


TokenEstimate = Callable[[Tensor], Tensor]
ResponseReduction = Callable[[Tensor, Tensor], Tensor]  # (values of tokens, lengths of responses) -> of responses
# How the log ratio of a response follows from those of its tokens; None: each token has its own.
LEVELS: dict[CorrectionLevel, ResponseReduction | None] = {
    CorrectionLevel.token: None,
    CorrectionLevel.sequence: sequence_sums,
    CorrectionLevel.geometric: _mean,
}
ESTIMATES: dict[str, TokenEstimate] = {"k1": _k1, "k2": _k2, "k3": _k3}
# How a response reduces the estimates of its tokens; None: each token is judged by itself.
REDUCTIONS: dict[str, ResponseReduction | None] = {
    "token": None,
    "seq_sum": sequence_sums,
    "seq_mean": _mean,
    "seq_max": _largest,
}


def _rejected(log_ratio_M: Tensor, counts_S: Tensor, config: RolloutCorrectionConfig) -> Tensor:
    """Bool [M]: the tokens that ``config.reject`` rejects."""
    if config.reject is Rejection.none:
        return torch.zeros_like(log_ratio_M, dtype=torch.bool)
    reduction, _, estimate = config.reject.value.rpartition("_")
    reduce = REDUCTIONS[reduction]
    x = ESTIMATES[estimate](log_ratio_M.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    x = x if reduce is None else reduce(x, counts_S)
    assert config.reject_upper is not None, "a rejection needs its bound"
    kept = x <= config.reject_upper
    if config.reject.bounds_ratio:
        lower = 1 / config.reject_upper if config.reject_lower is None else config.reject_lower
        kept = (log(lower) <= x) & (x <= log(config.reject_upper))
    return ~kept if reduce is None else ~at_tokens(kept, counts_S.tolist())


def _agreement(log_ratio_M: Tensor, counts_S: Tensor) -> dict[str, Tensor]:
    difference_M = log_ratio_M.abs()
    k3_M = kl_k3(torch.zeros(()), log_ratio_M.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    return {
        "counts_S": counts_S.double(),
        "differences_S": sequence_sums(difference_M, counts_S),
        "highest_S": _largest(difference_M, counts_S),
        "k1_S": -sequence_sums(log_ratio_M, counts_S),
        "k3_S": sequence_sums(k3_M, counts_S),
    }


def mean_weight(sums: CorrectionSums, config: RolloutCorrectionConfig) -> float:
    """The number by which ``batch_normalize`` divides all weights of the step; 1.0 without it, or if all are 0.

    It is the mean of the weights after truncation, over tokens or responses as ``level`` has it.  Weights that ``zero``
    set to 0 count; tokens that ``mask`` removed do not.  Rejection does not affect it, as in verl.
    """
    total = float(sums.weights_S.sum())
    count = float(sums.weighed_S.sum())
    return total / count if config.batch_normalize and total > 0 else 1.0


def correction_metrics(sums: CorrectionSums, config: RolloutCorrectionConfig, *, weighs: bool) -> dict[str, float]:
    """The metrics of the whole step, 0 if nothing is trained; the keys are those of ``tracking.metrics``.

    Over trained tokens: ``rollout/logprob_diff_mean`` and ``_max`` (absolute, nats); ``rollout/kl_k1`` and
    ``rollout/kl`` (k1 and k3 of KL(mu || old), nats).

    Of the ratio ``old / mu`` before any bound, over trained tokens, or with ``weighs`` over tokens or responses as
    ``level`` has it: ``rollout/ratio_mean``, ``_max``, ``_min`` and ``rollout/effective_sample_size``, ``(sum r)^2 / (n
    sum r^2)``: the share of samples of the policy itself that would be worth as much (L. Kish, Survey Sampling, 1965).

    With ``weighs`` ``rollout/truncated_share``, the share of these ratios above ``upper``.  With ``weighs`` or a
    rejection ``rollout/masked_share``, the share of trained tokens that are not in the loss.
    """
    count = max(float(sums.counts_S.sum()), 1.0)
    units = max(float(sums.units_S.sum()), 1.0)
    total = float(sums.ratios_S.sum())
    squares = float(sums.squares_S.sum())
    metrics = {
        "rollout/logprob_diff_mean": float(sums.differences_S.sum()) / count,
        "rollout/logprob_diff_max": float(sums.highest_S.max()),
        "rollout/kl_k1": float(sums.k1_S.sum()) / count,
        "rollout/kl": float(sums.k3_S.sum()) / count,
        "rollout/ratio_mean": total / units,
        "rollout/ratio_max": float(sums.largest_S.max()),
        "rollout/ratio_min": float(sums.smallest_S.min()) if total else 0.0,
        "rollout/effective_sample_size": total**2 / (units * squares) if squares else 0.0,
    }
    if weighs:
        metrics["rollout/truncated_share"] = float(sums.above_S.sum()) / units
    if weighs or config.reject is not Rejection.none:
        metrics["rollout/masked_share"] = float(sums.masked_S.sum()) / count
    return metrics
