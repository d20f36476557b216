"""Lite PPO (arXiv:2508.08221)."""

from __future__ import annotations

from mcore_rl.config.algorithm_object import Algorithm, Estimator, Scope, Sourced
from mcore_rl.config.algorithms.ppo import PPO_CLIP
from mcore_rl.config.roles import LossAggregation

BATCH_NORMALIZED = Estimator(
    name="lite_ppo",
    function="mcore_rl.algorithms.advantages.lite_ppo:lite_ppo",
    scope=Scope.sequence,
    formula="`(R - mean) / (std of all scores of the step + 1e-6)`, TRL's `scale_rewards=batch`",
    paper="arXiv:2508.08221",
    min_group=2,
)

LITE_PPO = Algorithm(
    name="lite_ppo",
    title="Lite PPO",
    about="the group's mean, the batch's deviation, a mean over tokens; no critic, no KL",
    paper="arXiv:2508.08221",
    advantages=BATCH_NORMALIZED,
    loss=PPO_CLIP,
    aggregation=Sourced(LossAggregation.token_mean, "arXiv:2508.08221: token-level aggregation"),
    samples=Sourced(8, "arXiv:2508.08221"),
)
