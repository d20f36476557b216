"""CISPO (arXiv:2506.13585, section 3.1): clips importance weights, so that every token keeps a gradient."""

from __future__ import annotations

from mcore_rl.algorithms.losses.token_losses import TokenLosses, above, below, clip_metrics, log_ratios
from mcore_rl.config.clipping import ClippedConfig
from mcore_rl.ground.types import LossInputs


def cispo(inputs: LossInputs, config: ClippedConfig) -> TokenLosses:
    """``-sg[clip(r, 1 - low, 1 + high)] A log p``, ``r = p / p_old``.

    The paper has no lower bound: ``clip_ratio_low=1`` or more.  Metrics count clipped weights.
    """
    assert inputs.logprobs_N is not None and inputs.advantages_N is not None
    ratio_N = log_ratios(inputs).detach().exp()
    low = 1 - config.clip_low
    high = 1 + config.clip_high
    loss_N = -ratio_N.clamp(low, high) * inputs.advantages_N * inputs.logprobs_N
    return TokenLosses(loss_N=loss_N, metrics=clip_metrics(below(ratio_N, low), above(ratio_N, high), inputs.mask_N))
