"""PPO with a critic (arXiv:1707.06347)."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.config.algorithm import AlgorithmConfig
from mcore_rl.config.algorithm_object import CRITIC, Algorithm, Estimator, PolicyLoss, Scope, Sourced
from mcore_rl.config.bounds import Share
from mcore_rl.config.clipping import PpoClipConfig, dual_clip_violations
from mcore_rl.config.roles import LossAggregation


@dataclass(kw_only=True)
class DiscountedConfig(AlgorithmConfig):
    """gamma: the discount of a reward, per token until it."""

    gamma: Share = 1.0


@dataclass(kw_only=True)
class GaeConfig(DiscountedConfig):
    """lam: GAE's lambda."""

    lam: Share = 1.0


GAE = Estimator(
    name="gae",
    function="mcore_rl.algorithms.advantages.gae:gae",
    scope=Scope.token,
    formula="`A_t = delta_t + gamma lam A_{t+1}`, `delta_t = r_t + gamma V_{t+1} - V_t`; whitened",
    paper="arXiv:1506.02438",
    roles=(CRITIC,),
    whitens=True,
    settings=GaeConfig,
)

PPO_CLIP = PolicyLoss(
    name="ppo_clip",
    function="mcore_rl.algorithms.losses.ppo_clip:ppo_clip",
    formula="`max(-A r, -A clip(r, 1 - low, 1 + high))`, where A < 0 at most `-A clip_ratio_c`",
    paper="arXiv:1707.06347, 1912.09729",
    settings=PpoClipConfig,
    rules=(dual_clip_violations,),
)

PPO = Algorithm(
    name="ppo",
    title="PPO",
    about="clipped ratios, advantages from a critic",
    paper="arXiv:1707.06347",
    advantages=GAE,
    loss=PPO_CLIP,
    aggregation=Sourced(LossAggregation.token_mean, "arXiv:1707.06347, eq. 7: a mean over time steps"),
    samples=Sourced(1, "the critic is the baseline: no group is needed"),
    settings={
        "algorithm.gamma": Sourced(1.0, "arXiv:1909.08593: no discount within a response"),
        "algorithm.lam": Sourced(0.95, "arXiv:1707.06347, table 3; verl's published runs take 1"),
        "actor.clip_ratio": Sourced(0.2, "arXiv:1707.06347, table 1: the best of three"),
    },
)
