"""Group relative policy optimization (arXiv:2402.03300, section 4.1.2)."""

from __future__ import annotations

from torch import Tensor

from mcore_rl.algorithms.advantages.groups import PromptGroups
from mcore_rl.config.algorithm import AlgorithmConfig

EPSILON = 1e-6  # added to the standard deviation, as in verl


def grpo(groups: PromptGroups, config: AlgorithmConfig) -> Tensor:
    """``A = (R - mean) / (std + 1e-6)`` over the group, the same for every token of a response.

    std has Bessel's correction, as in verl and TRL; the paper does not say.  The only member of a group gets 0, where
    verl gives its raw reward.
    """
    return groups.centred() / (groups.deviations() + EPSILON)
