"""REINFORCE++ with the mean of the group as the baseline (arXiv:2501.03262)."""

from __future__ import annotations

from mcore_rl.config.algorithm import KlPenalty
from mcore_rl.config.algorithm_object import Algorithm, Estimator, InLoss, Scope, Sourced
from mcore_rl.config.algorithms.ppo import PPO_CLIP
from mcore_rl.config.roles import LossAggregation

SCRIPT = "the authors' code, OpenRLHF: train_reinforce_baseline_hybrid_engine.sh"

GROUP_CENTRED_WHITENED = Estimator(
    name="reinforce_plus_plus_baseline",
    function="mcore_rl.algorithms.advantages.reinforce_plus_plus_baseline:reinforce_plus_plus_baseline",
    scope=Scope.sequence,
    formula="`R - mean`; whitened",
    paper="arXiv:2501.03262",
    min_group=2,
    whitens=True,
)

REINFORCE_PLUS_PLUS_BASELINE = Algorithm(
    name="reinforce_plus_plus_baseline",
    title="REINFORCE++ with baseline",
    about="scores less the group's mean, whitened over the batch, the KL in the loss",
    paper="arXiv:2501.03262",
    advantages=GROUP_CENTRED_WHITENED,
    loss=PPO_CLIP,
    aggregation=Sourced(LossAggregation.token_mean, "the authors' code, OpenRLHF: token_level_loss"),
    samples=Sourced(8, SCRIPT),
    kl=InLoss(KlPenalty.k2, SCRIPT, Sourced(1e-5, SCRIPT)),
)
