"""REINFORCE++ with the group's mean as baseline (arXiv:2501.03262)."""

from __future__ import annotations

from torch import Tensor

from mcore_rl.algorithms.advantages.groups import PromptGroups
from mcore_rl.config.algorithm import AlgorithmConfig


def reinforce_plus_plus_baseline(groups: PromptGroups, config: AlgorithmConfig) -> Tensor:
    """``A = R - mean`` over the group, the same for every token of a response; ``estimate`` whitens it later.

    Whitening is over the tokens of groups of two or more.  The only member of a group gets 0, where verl gives its raw
    reward.
    """
    return groups.centred()
