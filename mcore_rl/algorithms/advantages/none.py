"""No advantages: the reward is measured, and nothing is learnt from it."""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_rl.algorithms.advantages.groups import PromptGroups
from mcore_rl.config.algorithm import AlgorithmConfig


def none(groups: PromptGroups, config: AlgorithmConfig) -> Tensor:
    """``A = 0``: what a policy learns is a teacher's part of the advantages alone."""
    return torch.zeros_like(groups.raw_S)
