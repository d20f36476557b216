"""REINFORCE++ (arXiv:2501.03262): returns to go, whitened over the global batch; no critic and no groups."""

from __future__ import annotations

from mcore_rl.algorithms.advantages.inputs import AdvantageInputs, Advantages
from mcore_rl.algorithms.advantages.ragged import discounted_sums
from mcore_rl.config.algorithms.ppo import DiscountedConfig


def reinforce_plus_plus(inputs: AdvantageInputs, config: DiscountedConfig) -> Advantages:
    """``A_t = r_t + gamma A_{t+1}``; ``estimate`` whitens it later.

    t counts trained tokens only, as in verl (0.9.1): tokens that the environment wrote are skipped, so that the final
    score reaches every turn of a dialogue.
    """
    returns_M = discounted_sums(inputs.trained.gather(inputs.rewards_T), inputs.counts_S, config.gamma)
    return Advantages(advantages_T=inputs.trained.scatter(returns_M))
