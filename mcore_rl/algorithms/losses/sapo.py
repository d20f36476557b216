"""Soft adaptive policy optimization (arXiv:2511.20347): a soft gate on the ratio instead of a clip."""

from __future__ import annotations

import torch

from mcore_rl.algorithms.losses.token_losses import TokenLosses, log_ratios
from mcore_rl.config.algorithms.sapo import SapoConfig
from mcore_rl.ground.types import LossInputs


def sapo(inputs: LossInputs, config: SapoConfig) -> TokenLosses:
    """``-A f(r)``, ``f(r) = sigmoid(tau (r - 1)) 4 / tau``: at r = 1 its slope is 1, and it flattens on both sides.

    tau: ``tau_pos`` if A > 0, else ``tau_neg``, which is a little larger because the gradient of an unwanted token
    raises the whole rest of the vocabulary.  The paper's mean is ``loss_agg_mode=seq_mean_token_mean``.
    """
    assert inputs.advantages_N is not None
    advantages_N = inputs.advantages_N
    tau_N = torch.full_like(advantages_N, config.tau_neg).masked_fill(advantages_N > 0, config.tau_pos)
    gate_N = torch.sigmoid(tau_N * (log_ratios(inputs).exp() - 1)) * (4 / tau_N)
    return TokenLosses(loss_N=-advantages_N * gate_N)
