"""Group policy gradient (arXiv:2504.02546)."""

from __future__ import annotations

from torch import Tensor

from mcore_rl.algorithms.advantages.groups import PromptGroups
from mcore_rl.config.algorithm import AlgorithmConfig


def gpg(groups: PromptGroups, config: AlgorithmConfig) -> Tensor:
    """``A = alpha (R - mean)`` over the group, the same for every token of a response.

    ``alpha = B / (B - M)``: B responses have trained tokens, and M of these are in groups whose scores are all equal.
    These M have no gradient, and alpha takes them out of the average.  verl counts responses of score 0 instead.
    """
    silent_S = groups.member_S & (groups.deviations() == 0)
    total = int(groups.member_S.sum())
    silent = int(silent_S.sum())
    return groups.centred() * (total / max(total - silent, 1))
