"""Pass@k: what a response adds to the best of k (PKPO, arXiv:2505.15201)."""

from __future__ import annotations

from math import comb

import torch
from torch import Tensor

from mcore_rl.algorithms.advantages.groups import PromptGroups
from mcore_rl.config.algorithms.pkpo import PassAtKConfig


def pass_at_k(groups: PromptGroups, config: PassAtKConfig) -> Tensor:
    """The mean, over all sets of ``pass_k`` members with this response, of ``max(set) - max(set without it)``.

    ``comb(n, k) / comb(n - 1, k - 1) = n / k`` times the paper's ``s^(loo-1)`` (eq. 33), whose sum is divided by all
    sets: a mean over the response's own sets has the size of a reward for any n and k.  Its policy gradient is that of
    the expected best score of k responses, without bias; of pass@k, where scores are 0 and 1.  A group with fewer
    members than k takes all of them as its k.
    """
    advantages_S = torch.zeros_like(groups.scores_S)
    for members in groups.members_of(groups.has_siblings_S):
        advantages_S[members] = _marginal(groups.scores_S[members], min(config.pass_k, len(members)))
    return advantages_S


def _marginal(scores_N: Tensor, k: int) -> Tensor:
    """The mean marginal contribution of each of ``N`` scores to the maximum of the ``k``-subsets that contain it.

    Only the maximum of a set contributes.  Let j count the scores from 0 in ascending order: of the sets whose maximum
    is i, ``comb(j, k - 2)`` have j as the second highest, and i adds ``score_i - score_j``.
    """
    n = len(scores_N)
    ascending_N, order_N = scores_N.sort(stable=True)
    share_N = torch.tensor([comb(j, k - 2) / comb(n - 1, k - 1) for j in range(n)], dtype=scores_N.dtype)
    gains_NN = (ascending_N[:, None] - ascending_N[None, :]).tril(diagonal=-1)
    return torch.empty_like(scores_N).index_copy_(0, order_N, gains_NN @ share_N)
