"""On-policy RL with optimal reward baseline (arXiv:2505.23585)."""

from __future__ import annotations

from torch import Tensor

from mcore_rl.algorithms.advantages.groups import PromptGroups
from mcore_rl.config.algorithm import AlgorithmConfig


def opo(groups: PromptGroups, config: AlgorithmConfig) -> Tensor:
    """``A = R - sum(length R) / sum(length)`` over the group, the same for every token of a response.

    This baseline has the least variance if gradient norms grow with the square root of the length.  Lengths count
    trained tokens.
    """
    lengths_S = groups.counts_S.to(groups.scores_S.dtype)
    baseline_S = groups.sums(lengths_S * groups.scores_S) / groups.sums(lengths_S).clamp(min=1)
    return groups.scores_S - baseline_S
