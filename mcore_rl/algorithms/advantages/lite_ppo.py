"""Lite PPO (arXiv:2508.08221): GRPO scaled by the batch's standard deviation; TRL's ``scale_rewards="batch"``."""

from __future__ import annotations

from torch import Tensor

from mcore_rl.algorithms.advantages.groups import PromptGroups
from mcore_rl.config.algorithm import AlgorithmConfig

EPSILON = 1e-6  # added to the standard deviation; TRL adds 1e-4


def lite_ppo(groups: PromptGroups, config: AlgorithmConfig) -> Tensor:
    """``A = (R - mean) / (std + 1e-6)``: the mean over the group, std over all responses of the step.

    Division by a group's own deviation would inflate the advantages of a group in which nearly all are right; the
    step's deviation does not.  std is of the scores themselves, with Bessel's correction, as in TRL.
    """
    scores_S = groups.raw_S[groups.member_S].double()
    deviation = float(scores_S.std()) if len(scores_S) > 1 else 0.0
    return groups.centred() / (deviation + EPSILON)
