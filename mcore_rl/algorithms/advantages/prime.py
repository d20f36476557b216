"""PRIME (arXiv:2502.01456): returns to go of process and outcome rewards, each centred within its group before."""

from __future__ import annotations

from mcore_rl.algorithms.advantages.inputs import AdvantageInputs, Advantages
from mcore_rl.algorithms.advantages.reinforce_plus_plus import reinforce_plus_plus
from mcore_rl.config.algorithms.prime import PrimeConfig


def prime(inputs: AdvantageInputs, config: PrimeConfig) -> Advantages:
    """As REINFORCE++, of the rewards that ``algorithms/process_rewards.py`` has centred; whitened later."""
    return reinforce_plus_plus(inputs, config)
