"""Dr. GRPO (arXiv:2503.20783): GRPO without its two biases."""

from __future__ import annotations

from mcore_rl.config.algorithm_object import Algorithm, Estimator, Scope, Sourced
from mcore_rl.config.algorithms.ppo import PPO_CLIP
from mcore_rl.config.roles import LossAggregation

GROUP_CENTRED = Estimator(
    name="dr_grpo",
    function="mcore_rl.algorithms.advantages.dr_grpo:dr_grpo",
    scope=Scope.sequence,
    formula="`R - mean`",
    paper="arXiv:2503.20783",
    min_group=2,
)

DR_GRPO = Algorithm(
    name="dr_grpo",
    title="Dr. GRPO",
    about="no division by the group's deviation, nor by lengths; no KL",
    paper="arXiv:2503.20783",
    advantages=GROUP_CENTRED,
    loss=PPO_CLIP,
    aggregation=Sourced(LossAggregation.sum_over_constant, "arXiv:2503.20783, listing 1: over the longest response"),
    samples=Sourced(8, "the authors' code, understand-r1-zero: num_samples 8, beta 0"),
)
