"""GRPO (arXiv:2402.03300)."""

from __future__ import annotations

from mcore_rl.config.algorithm import KlPenalty
from mcore_rl.config.algorithm_object import Algorithm, Estimator, InLoss, Scope, Sourced
from mcore_rl.config.algorithms.ppo import PPO_CLIP
from mcore_rl.config.roles import LossAggregation

GROUP_NORMALIZED = Estimator(
    name="grpo",
    function="mcore_rl.algorithms.advantages.grpo:grpo",
    scope=Scope.sequence,
    formula="`(R - mean) / (std + 1e-6)`",
    paper="arXiv:2402.03300",
    min_group=2,
)

GRPO = Algorithm(
    name="grpo",
    title="GRPO",
    about="scores normalized within the group, the KL in the loss",
    paper="arXiv:2402.03300",
    advantages=GROUP_NORMALIZED,
    loss=PPO_CLIP,
    aggregation=Sourced(LossAggregation.seq_mean_token_mean, "arXiv:2402.03300, eq. 3; verl's runs take token_mean"),
    samples=Sourced(5, "verl's GRPO runs (docs/baselines.md); the paper draws 64"),
    kl=InLoss(
        KlPenalty.k3,
        "arXiv:2402.03300, eq. 3 and 4",
        Sourced(0.001, "arXiv:2501.12948 (DeepSeek-R1) and verl's runs; 0.04 in arXiv:2402.03300"),
    ),
)
