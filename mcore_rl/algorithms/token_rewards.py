"""From one score a response to one reward a token.

The score of a response is the reward of its last trained token; the KL penalty is subtracted where it arises
(arXiv:1909.08593, eq. 2).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mcore_rl.algorithms.ragged import last_trained, sequence_counts


def token_rewards(
    lengths_S: Sequence[int], mask_T: Tensor, scores_S: Tensor, kl_T: Tensor | None = None, kl_coef: float = 0.0
) -> Tensor:
    """Rewards [T] in the dtype of ``scores_S``: scores at last trained tokens, minus ``kl_coef * kl_T``.

    mask_T: bool.  scores_S: finite.  kl_T: nats, any estimate of each token's KL(policy || reference); read at trained
    tokens only.  Untrained tokens get 0.  The score of a sequence with no trained token goes nowhere: there is no
    action that could have earned it.
    """
    rewards_T = torch.zeros(mask_T.numel(), dtype=scores_S.dtype)
    counts_S = sequence_counts(mask_T, lengths_S)
    rewards_T[last_trained(mask_T, lengths_S)] = scores_S[counts_S > 0]
    if kl_T is not None:
        rewards_T.sub_(kl_T.to(rewards_T.dtype).masked_fill(~mask_T, 0), alpha=kl_coef)
    return rewards_T
