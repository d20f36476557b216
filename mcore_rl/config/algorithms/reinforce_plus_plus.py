"""REINFORCE++ (arXiv:2501.03262): no critic and no groups, advantages normalized over the whole batch."""

from __future__ import annotations

from mcore_rl.config.algorithm import KlPenalty
from mcore_rl.config.algorithm_object import Algorithm, Estimator, InReward, Scope, Sourced
from mcore_rl.config.algorithms.ppo import PPO_CLIP, DiscountedConfig
from mcore_rl.config.roles import LossAggregation

RETURNS = Estimator(
    name="reinforce_plus_plus",
    function="mcore_rl.algorithms.advantages.reinforce_plus_plus:reinforce_plus_plus",
    scope=Scope.token,
    formula="`A_t = r_t + gamma A_{t+1}`; whitened",
    paper="arXiv:2501.03262",
    whitens=True,
    settings=DiscountedConfig,
)

REINFORCE_PLUS_PLUS = Algorithm(
    name="reinforce_plus_plus",
    title="REINFORCE++",
    about="no critic, no groups: returns whitened over the batch, the KL in the reward",
    paper="arXiv:2501.03262",
    advantages=RETURNS,
    loss=PPO_CLIP,
    aggregation=Sourced(LossAggregation.token_mean, "the authors' code, OpenRLHF: token_level_loss"),
    samples=Sourced(1, "arXiv:2501.03262: one response to a prompt is enough"),
    kl=InReward(KlPenalty.k1, "arXiv:2501.03262", Sourced(0.001, "verl's examples/reinforce_plus_plus_trainer")),
    settings={"algorithm.gamma": Sourced(1.0, "the authors' code, OpenRLHF")},
)
