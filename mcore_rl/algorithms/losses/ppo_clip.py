"""PPO's clipped surrogate (arXiv:1707.06347, eq. 7), with its relatives: clip-higher and the dual clip."""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_rl.algorithms.losses.token_losses import TokenLosses, above, below, clip_metrics, log_ratios, masked_sum
from mcore_rl.config.clipping import ClippedConfig, PpoClipConfig
from mcore_rl.ground.types import LossInputs


def ppo_clip(inputs: LossInputs, config: PpoClipConfig) -> TokenLosses:
    """``max(-A r, -A clip(r, 1 - low, 1 + high))``, and at most ``-A c`` if A < 0; ``r = p / p_old``.

    low, high: ``clip_low``, ``clip_high`` (arXiv:2503.14476, section 3.1).  c: ``clip_ratio_c``, the dual clip
    (arXiv:1912.09729).  It is also the delta of two-sided clipping in INTELLECT-2 (arXiv:2505.07291) and TRL: with
    ``delta > 1 + high`` both are one formula.  None is no dual clip, as in PPO and GRPO.

    Metrics count tokens without gradient: those clipped below (A < 0) and above (A > 0), and apart those beyond c
    (A < 0).
    """
    ratio_N = log_ratios(inputs).exp()
    surrogate = clipped_surrogate(ratio_N, inputs, config)
    most = config.clip_ratio_c
    if most is None:
        return surrogate
    advantages_N = inputs.advantages_N
    assert advantages_N is not None
    bounded_N = torch.minimum(surrogate.loss_N, -advantages_N * most)
    beyond_N = (advantages_N < 0) & above(ratio_N.detach(), most)
    dual = {"actor/clip_fraction_dual": masked_sum(beyond_N.float(), inputs.mask_N)}
    return TokenLosses(
        loss_N=torch.where(advantages_N < 0, bounded_N, surrogate.loss_N), metrics=surrogate.metrics | dual
    )


def clipped_surrogate(ratio_N: Tensor, inputs: LossInputs, config: ClippedConfig) -> TokenLosses:
    """``max(-A r, -A clip(r, 1 - low, 1 + high))`` of ratios r, [N], with gradient.

    Metrics count tokens that the clip leaves without gradient: below if A < 0, above if A > 0.
    """
    advantages_N = inputs.advantages_N
    assert advantages_N is not None
    low = 1 - config.clip_low
    high = 1 + config.clip_high
    loss_N = torch.maximum(-advantages_N * ratio_N, -advantages_N * ratio_N.clamp(low, high))
    metrics = clip_metrics(
        (advantages_N < 0) & below(ratio_N, low), (advantages_N > 0) & above(ratio_N, high), inputs.mask_N
    )
    return TokenLosses(loss_N=loss_N, metrics=metrics)
