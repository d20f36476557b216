"""GDPO, group reward-decoupled normalization (arXiv:2601.05242): each named reward is normalised by itself."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mcore_rl.algorithms.advantages.groups import PromptGroups
from mcore_rl.algorithms.advantages.grpo import EPSILON, grpo
from mcore_rl.config.algorithms.gdpo import GdpoConfig


def gdpo(groups: PromptGroups, config: GdpoConfig) -> Tensor:
    """``A = Z / (std(Z) + 1e-6)``, ``Z = sum over k of w_k (R_k - mean_k) / (std_k + 1e-6)``.

    R_k: the parts of the reward that ``gdpo_reward_keys`` names; w_k: ``gdpo_reward_weights``.  ``mean_k`` and
    ``std_k`` are over the group.  ``std(Z)`` is over all responses of the step that have siblings; their Z has mean 0.
    The paper and TRL (``multi_objective_aggregation="normalize_then_sum"``) also take it over responses; verl whitens
    over tokens, so that long responses weigh more.
    """
    assert groups.parts_SK is not None, "gdpo needs parts_SK"
    weights = config.gdpo_reward_weights or [1.0] * groups.parts_SK.shape[1]
    total_S = torch.zeros_like(groups.scores_S)
    for weight, scores_S in zip(weights, groups.parts_SK.unbind(1), strict=True):
        total_S = total_S + weight * grpo(groups.by(scores_S), config)
    count = int(groups.has_siblings_S.sum())
    deviation = math.sqrt(float(total_S.double().square().sum()) / max(count - 1, 1))
    return total_S / (deviation + EPSILON)
