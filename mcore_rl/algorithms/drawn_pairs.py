"""Losses of pairs (DPO, arXiv:2305.18290, and its relatives) as a policy loss, for pairs that a run draws itself."""

from __future__ import annotations

import torch

from mcore_rl.algorithms.losses.token_losses import TokenLosses
from mcore_rl.algorithms.preference import losses_of_pairs
from mcore_rl.config.pairs import PairsConfig
from mcore_rl.types import LossInputs

PREFIX = "pairs/"  # of its metrics


def preference(inputs: LossInputs, config: PairsConfig) -> TokenLosses:
    """The loss that ``config.preference`` names, of each pair.

    Both responses of a pair have a trained token, and each has the whole loss of its pair, spread evenly over its
    trained tokens.  With ``loss_agg_mode=seq_mean_token_sum``, whose divisor counts responses, the sum is the mean over
    pairs.  Metrics are those of ``algorithms/preference.py``.
    """
    assert inputs.logprobs_N is not None and inputs.pairs_P2 is not None, "a loss of pairs needs pairs"
    counts_S = inputs.sequence_sums(inputs.mask_N.to(inputs.logprobs_N.dtype))
    share_S = inputs.own_shares(inputs.logprobs_N.dtype)
    loss_P, metrics = losses_of_pairs(inputs, config.preference, share_S)
    loss_S = torch.zeros_like(counts_S).index_add(0, inputs.pairs_P2.flatten(), loss_P.repeat_interleave(2))
    loss_N = inputs.expand(loss_S / counts_S.clamp(min=1))
    return TokenLosses(loss_N=loss_N, metrics={f"{PREFIX}{name}": value for name, value in metrics.items()})
