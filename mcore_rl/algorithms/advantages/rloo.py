"""REINFORCE leave-one-out (arXiv:2402.14740)."""

from __future__ import annotations

from mcore_rl.algorithms.advantages.groups import PromptGroups
from mcore_rl.algorithms.advantages.inputs import AdvantageInputs, Advantages
from mcore_rl.config.algorithm import AlgorithmConfig


def rloo(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """``A = R - mean of the other members = n / (n - 1) (R - mean)``, the same for every token of a response."""
    groups = PromptGroups.of(inputs)
    advantages_S = groups.centred() * groups.sizes_S / (groups.sizes_S - 1).clamp(min=1)
    return Advantages(advantages_T=inputs.spread(advantages_S))
