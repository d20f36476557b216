"""PPO's clipped surrogate (arXiv:1707.06347, eq. 7), with its relatives: clip-higher and the dual clip."""

from __future__ import annotations

import torch

from mcore_rl.algorithms.losses.token_losses import TokenLosses, clip_metrics, log_ratios, masked_sum
from mcore_rl.config.roles import ActorConfig
from mcore_rl.types import LossInputs


def ppo_clip(inputs: LossInputs, config: ActorConfig) -> TokenLosses:
    """``max(-A r, -A clip(r, 1 - low, 1 + high))``, where A < 0 at most ``-A c``; ``r = p / p_old``.

    low, high: ``clip_low``, ``clip_high`` (arXiv:2503.14476, section 3.1).  c: ``clip_ratio_c`` (arXiv:1912.09729).
    Metrics count tokens whose gradient is cut off: below (A < 0), above (A > 0), and beyond c (A < 0, apart).
    """
    assert inputs.advantages_N is not None
    ratio_N, advantages_N = log_ratios(inputs).exp(), inputs.advantages_N
    low, high, most = 1 - config.clip_low, 1 + config.clip_high, config.clip_ratio_c
    clipped_N = torch.maximum(-advantages_N * ratio_N, -advantages_N * ratio_N.clamp(low, high))
    loss_N = torch.where(advantages_N < 0, torch.minimum(clipped_N, -advantages_N * most), clipped_N)

    with torch.no_grad():
        metrics = clip_metrics(
            (advantages_N < 0) & (ratio_N < low), (advantages_N > 0) & (ratio_N > high), inputs.mask_N
        )
        beyond_N = (advantages_N < 0) & (ratio_N > most)
        metrics["actor/clip_fraction_dual"] = masked_sum(beyond_N.float(), inputs.mask_N)
    return TokenLosses(loss_N=loss_N, metrics=metrics)
