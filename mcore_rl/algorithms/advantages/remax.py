"""ReMax (arXiv:2310.10505): the score of the greedy response to the same prompt is the baseline."""

from __future__ import annotations

from mcore_rl.algorithms.advantages.inputs import AdvantageInputs, Advantages
from mcore_rl.algorithms.advantages.ragged import discounted_sums
from mcore_rl.config.algorithm import AlgorithmConfig


def remax(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """``A_t = sum of r from t on, minus the greedy score``.

    Not discounted, as in the paper and in verl.  The greedy score carries no KL penalty.
    """
    assert inputs.greedy_S is not None
    to_go_M = discounted_sums(inputs.trained.gather(inputs.rewards_T), inputs.counts_S, 1.0)
    baseline_T = inputs.spread(inputs.greedy_S.to(inputs.rewards_T.dtype))
    return Advantages(advantages_T=inputs.trained.scatter(to_go_M) - baseline_T)
