"""Clip-Cov (arXiv:2505.22617, section 4.2): a few tokens of high covariance are not trained, to keep the entropy."""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_rl.algorithms.losses.ppo_clip import clipped_surrogate
from mcore_rl.algorithms.losses.token_losses import TokenLosses, log_ratios, masked_sum
from mcore_rl.config.algorithms.clip_cov import ClipCovConfig
from mcore_rl.ground.types import LossInputs


def clip_cov(inputs: LossInputs, config: ClipCovConfig) -> TokenLosses:
    """PPO's clipped loss without the dual clip; 0, without gradient, at the selected tokens.

    The share ``clip_cov_ratio`` of the step's tokens is selected, at random from those whose covariance lies between
    ``clip_cov_lb`` and ``clip_cov_ub`` (``algorithms/selection.py``).  verl selects in each microbatch, from its tokens
    that are not clipped.
    """
    assert inputs.selection_N is not None, "clip_cov needs its selection"
    surrogate = clipped_surrogate(log_ratios(inputs).exp(), inputs, config)
    selected_N = inputs.selection_N >= 0
    selected = {"actor/selected_fraction": masked_sum(selected_N.float(), inputs.mask_N)}
    return TokenLosses(loss_N=surrogate.loss_N.masked_fill(selected_N, 0), metrics=surrogate.metrics | selected)


def clip_cov_keys(covariance_M: Tensor, uniform_M: Tensor, config: ClipCovConfig) -> Tensor:
    """The uniform draw of each candidate for selection, -inf for other tokens; [M]."""
    candidate_M = (config.clip_cov_lb < covariance_M) & (covariance_M < config.clip_cov_ub)
    return torch.where(candidate_M, uniform_M, -torch.inf)
