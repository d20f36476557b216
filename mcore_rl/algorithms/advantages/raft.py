"""RAFT: rejection sampling (arXiv:2304.06767, arXiv:2504.11343)."""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_rl.algorithms.advantages.groups import PromptGroups
from mcore_rl.config.algorithm import AlgorithmConfig


def raft(groups: PromptGroups, config: AlgorithmConfig) -> Tensor:
    """``A = max(R, 0)``, the same for every token of a response: only responses with a positive score are trained.

    There is no baseline and no comparison; with scores of 0 and 1 it is supervised fine-tuning on the right responses.
    """
    return torch.where(groups.member_S, groups.raw_S.clamp(min=0), 0)


def best_of_n(groups: PromptGroups, config: AlgorithmConfig) -> Tensor:
    """``A = 1 / ties`` for the best responses of a group, 0 for the others (arXiv:2304.06767, algorithm 1).

    ties: how many members share the highest score, so that every prompt counts as one response.  The paper keeps one of
    them at random.  A group whose scores are all equal has no best response and gets 0.
    """
    ranked_S = groups.ranked_S
    highest_G = torch.zeros_like(ranked_S)
    highest_G.scatter_reduce_(0, groups.index_S, ranked_S, "amax")
    highest_S = highest_G[groups.index_S]
    best_S = (highest_S > 0) & (ranked_S == highest_S)
    ties_S = groups.sums(best_S.to(groups.scores_S.dtype))
    return torch.where(best_S, 1 / ties_S.clamp(min=1), 0)
