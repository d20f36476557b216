"""KL-Cov (arXiv:2505.22617, section 4.2): a penalty keeps the tokens of highest covariance from moving."""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_rl.algorithms.losses.token_losses import TokenLosses, log_ratios, masked_sum
from mcore_rl.config.algorithms.kl_cov import KlCovConfig
from mcore_rl.ground.types import LossInputs


def kl_cov(inputs: LossInputs, config: KlCovConfig) -> TokenLosses:
    """``-A r``, and at the selected tokens ``-A r + ppo_kl_coef |log r|``; there is no clip.

    The share ``kl_cov_ratio`` of the step's tokens is selected, those with the largest covariance
    (``algorithms/selection.py``).  verl selects at least one in each microbatch.
    """
    assert inputs.selection_N is not None and inputs.advantages_N is not None, "kl_cov needs its selection"
    changes_N = log_ratios(inputs)
    selected_N = inputs.selection_N >= 0
    paid_N = torch.where(selected_N, config.ppo_kl_coef * changes_N.abs(), 0)
    metrics = {"actor/selected_fraction": masked_sum(selected_N.float(), inputs.mask_N)}
    return TokenLosses(loss_N=paid_N - inputs.advantages_N * changes_N.exp(), metrics=metrics)


def kl_cov_keys(covariance_M: Tensor, uniform_M: Tensor, config: KlCovConfig) -> Tensor:
    """The keys are the covariances themselves; [M]."""
    return covariance_M
