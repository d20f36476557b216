"""Geometric-mean policy optimization, GMPO (arXiv:2507.20673): the geometric mean of clipped ratios of tokens."""

from __future__ import annotations

import torch

from mcore_rl.algorithms.losses.token_losses import MAX_LOG_RATIO, ROUNDING, TokenLosses, clip_metrics, log_ratios
from mcore_rl.config.clipping import ClippedConfig
from mcore_rl.ground.types import LossInputs


def geo_mean(inputs: LossInputs, config: ClippedConfig) -> TokenLosses:
    """``-A s``, ``log s = mean over the response of c``: c is ``log r``, clipped to ``[-low, high]`` as PPO clips.

    As PPO clips: to at most ``high`` if A > 0, to at least ``-low`` if A < 0.  The clip range is of the logarithm: the
    paper's is ``clip_ratio=0.4``, ratios of e^-0.4 to e^0.4.  Each token has the value of the whole response and its
    own gradient, as in ``gspo``.  With ``loss_agg_mode=seq_mean_token_mean`` and one advantage per response, their sum
    is the paper's objective and verl's ``geo_mean``.
    """
    assert inputs.advantages_N is not None
    advantages_N = inputs.advantages_N
    changes_N = log_ratios(inputs)
    low = -config.clip_low
    high = config.clip_high
    clipped_N = torch.where(advantages_N > 0, changes_N.clamp(max=high), changes_N.clamp(min=low))
    counts_S = inputs.sequence_sums(inputs.mask_N.to(changes_N.dtype)).clamp(min=1)
    mean_S = (inputs.sequence_sums(clipped_N.detach().masked_fill(~inputs.mask_N, 0)) / counts_S).clamp(
        -MAX_LOG_RATIO, MAX_LOG_RATIO
    )
    ratio_N = inputs.expand(mean_S.exp()) * (1 + clipped_N - clipped_N.detach())
    low_N = changes_N < low - ROUNDING
    high_N = changes_N > high + ROUNDING
    metrics = clip_metrics((advantages_N < 0) & low_N, (advantages_N > 0) & high_N, inputs.mask_N)
    return TokenLosses(loss_N=-advantages_N * ratio_N, metrics=metrics)
