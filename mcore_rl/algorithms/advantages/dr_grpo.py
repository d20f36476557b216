"""GRPO done right: without the division by the standard deviation (arXiv:2503.20783)."""

from __future__ import annotations

from torch import Tensor

from mcore_rl.algorithms.advantages.groups import PromptGroups
from mcore_rl.config.algorithm import AlgorithmConfig


def dr_grpo(groups: PromptGroups, config: AlgorithmConfig) -> Tensor:
    """``A = R - mean`` over the group, the same for every token of a response.

    The paper's other half is its loss, a sum over tokens divided by a constant: ``loss_agg_mode=sum_over_constant``.
    """
    return groups.centred()
