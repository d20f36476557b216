"""Soft adaptive policy optimization (arXiv:2511.20347): a gate that fades out in the place of a clip."""

from __future__ import annotations

import torch

from mcore_rl.algorithms.losses.token_losses import TokenLosses, log_ratios
from mcore_rl.config.roles import ActorConfig
from mcore_rl.types import LossInputs


def sapo(inputs: LossInputs, config: ActorConfig) -> TokenLosses:
    """``-A f(r)``, ``f(r) = sigmoid(tau (r - 1)) 4 / tau``: at r = 1 its slope is 1, and it flattens both ways.

    tau: ``tau_pos`` where A > 0, else ``tau_neg``, a little more, for the gradients of unwanted tokens spread over the
    whole vocabulary.  The paper's mean is ``loss_agg_mode=seq_mean_token_mean``.
    """
    assert inputs.advantages_N is not None
    advantages_N = inputs.advantages_N
    tau_N = torch.full_like(advantages_N, config.tau_neg).masked_fill(advantages_N > 0, config.tau_pos)
    gate_N = torch.sigmoid(tau_N * (log_ratios(inputs).exp() - 1)) * (4 / tau_N)
    return TokenLosses(loss_N=-advantages_N * gate_N)
