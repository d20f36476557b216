"""PPO's clipped surrogate (arXiv:1707.06347, eq. 7), with its relatives: clip-higher and the dual clip."""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_rl.algorithms.losses.token_losses import TokenLosses, above, below, clip_metrics, log_ratios, masked_sum
from mcore_rl.config.clipping import ClippedConfig, PpoClipConfig
from mcore_rl.types import LossInputs


def ppo_clip(inputs: LossInputs, config: PpoClipConfig) -> TokenLosses:
    """``max(-A r, -A clip(r, 1 - low, 1 + high))``, and at most ``-A c`` if A < 0; ``r = p / p_old``.

    low, high: ``clip_low``, ``clip_high`` (arXiv:2503.14476, section 3.1).  c: ``clip_ratio_c``, the dual clip
    (arXiv:1912.09729).  It is also the delta of two-sided clipping in INTELLECT-2 (arXiv:2505.07291) and TRL: with
    ``delta > 1 + high`` both are one formula.  None is no dual clip, as in PPO and GRPO.

    Metrics count tokens without gradient: those clipped below (A < 0) and above (A > 0), and apart those beyond c
    (A < 0).
    """
    loss_N, ratio_N = clipped_surrogate(inputs, config)
    advantages_N = inputs.advantages_N
    most = config.clip_ratio_c
    assert advantages_N is not None
    metrics = surrogate_clips(ratio_N, advantages_N, inputs.mask_N, config)
    if most is not None:
        loss_N = torch.where(advantages_N < 0, torch.minimum(loss_N, -advantages_N * most), loss_N)
        beyond_N = (advantages_N < 0) & above(ratio_N.detach(), most)
        metrics["actor/clip_fraction_dual"] = masked_sum(beyond_N.float(), inputs.mask_N)
    return TokenLosses(loss_N=loss_N, metrics=metrics)


def clipped_surrogate(inputs: LossInputs, config: ClippedConfig) -> tuple[Tensor, Tensor]:
    """(``max(-A r, -A clip(r, 1 - low, 1 + high))``, r), each [N] and with gradient."""
    assert inputs.advantages_N is not None
    ratio_N = log_ratios(inputs).exp()
    clipped_N = ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high)
    return torch.maximum(-inputs.advantages_N * ratio_N, -inputs.advantages_N * clipped_N), ratio_N


@torch.no_grad()
def surrogate_clips(ratio_N: Tensor, advantages_N: Tensor, mask_N: Tensor, config: ClippedConfig) -> dict[str, Tensor]:
    """The metrics of tokens that the clip leaves without gradient: below if A < 0, above if A > 0."""
    low_N = below(ratio_N, 1 - config.clip_low)
    high_N = above(ratio_N, 1 + config.clip_high)
    return clip_metrics((advantages_N < 0) & low_N, (advantages_N > 0) & high_N, mask_N)
