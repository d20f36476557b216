"""Generalized advantage estimation (arXiv:1506.02438), the advantages of PPO (arXiv:1707.06347)."""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_rl.algorithms.advantages.inputs import AdvantageInputs, Advantages
from mcore_rl.algorithms.advantages.ragged import discounted_sums
from mcore_rl.config.algorithms.ppo import GaeConfig


def gae(inputs: AdvantageInputs, config: GaeConfig) -> Advantages:
    """``A_t = delta_t + gamma lam A_{t+1}``, ``delta_t = r_t + gamma V_{t+1} - V_t``; the returns are ``A + V``.

    t counts trained tokens only; tokens that the environment wrote are skipped, as in verl.  After the last trained
    token the value is 0.  ``estimate`` whitens the advantages later, as verl and TRL do and the paper does not; returns
    are never whitened.
    """
    deltas_M, values_M = temporal_differences(inputs, config.gamma)
    advantages_M = discounted_sums(deltas_M, inputs.counts_S, config.gamma * config.lam)
    return Advantages(
        advantages_T=inputs.trained.scatter(advantages_M),
        returns_T=inputs.trained.scatter(advantages_M + values_M),
    )


def temporal_differences(inputs: AdvantageInputs, gamma: float) -> tuple[Tensor, Tensor]:
    """(``delta_t = r_t + gamma V_{t+1} - V_t``, ``V_t``) of the trained tokens, [M]."""
    assert inputs.values_T is not None
    values_M = inputs.trained.gather(inputs.values_T)
    rewards_M = inputs.trained.gather(inputs.rewards_T)
    next_values_M = torch.zeros_like(values_M)
    next_values_M[:-1] = values_M[1:]
    last_S = inputs.counts_S.cumsum(0) - 1
    next_values_M[last_S[inputs.counts_S > 0]] = 0
    return rewards_M.add_(next_values_M, alpha=gamma).sub_(values_M), values_M
