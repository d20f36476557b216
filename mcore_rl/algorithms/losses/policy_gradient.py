"""The plain policy gradient: REINFORCE (R. J. Williams, Machine Learning 8, 1992)."""

from __future__ import annotations

from mcore_rl.algorithms.losses.token_losses import TokenLosses
from mcore_rl.config.roles import ActorConfig
from mcore_rl.ground.types import LossInputs


def policy_gradient(inputs: LossInputs, config: ActorConfig) -> TokenLosses:
    """``-A log p``: no ratio and no clipping, so it is exact only while the policy is the one that sampled."""
    assert inputs.logprobs_N is not None and inputs.advantages_N is not None
    return TokenLosses(loss_N=-inputs.advantages_N * inputs.logprobs_N)
