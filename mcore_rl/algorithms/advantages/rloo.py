"""REINFORCE leave-one-out (arXiv:2402.14740)."""

from __future__ import annotations

from torch import Tensor

from mcore_rl.algorithms.advantages.groups import PromptGroups
from mcore_rl.config.algorithm import AlgorithmConfig


def rloo(groups: PromptGroups, config: AlgorithmConfig) -> Tensor:
    """``A = R - mean of the other members = n / (n - 1) (R - mean)``, the same for every token of a response."""
    return groups.centred() * groups.sizes_S / (groups.sizes_S - 1).clamp(min=1)
