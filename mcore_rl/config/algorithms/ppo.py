"""PPO with a critic (arXiv:1707.06347)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from mcore_rl.config.algorithm import AlgorithmConfig
from mcore_rl.config.algorithm_object import CRITIC, Algorithm, Estimator, PolicyLoss, Scope, Sourced
from mcore_rl.config.bounds import Interval, NonNegativeFloat, Share
from mcore_rl.config.roles import ActorConfig, LossAggregation
from mcore_rl.errors import Violation

if TYPE_CHECKING:
    from mcore_rl.config.run import RunConfig


@dataclass(kw_only=True)
class DiscountedConfig(AlgorithmConfig):
    """gamma: the discount of a reward, per token until it."""

    gamma: Share = 1.0


@dataclass(kw_only=True)
class GaeConfig(DiscountedConfig):
    """lam: GAE's lambda."""

    lam: Share = 1.0


@dataclass(kw_only=True)
class ClippedConfig(ActorConfig):
    """A loss that clips ratios.

    clip_ratio: how far below and above 1 ratios count.
    clip_ratio_low, clip_ratio_high: how far below, and above, if these differ (arXiv:2503.14476); None is clip_ratio.
    ``geo_mean`` clips the ratio's logarithm by them.
    """

    clip_ratio: NonNegativeFloat = 0.2
    clip_ratio_low: NonNegativeFloat | None = None
    clip_ratio_high: NonNegativeFloat | None = None

    @property
    def clip_low(self) -> float:
        """The clip range below 1."""
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def clip_high(self) -> float:
        """The clip range above 1."""
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high


@dataclass(kw_only=True)
class PpoClipConfig(ClippedConfig):
    """clip_ratio_c: bound of the dual clip (arXiv:1912.09729), TRL's delta; None is no dual clip."""

    clip_ratio_c: Annotated[float, Interval("(1, inf)")] | None = None


def _dual_clip_violations(run: RunConfig) -> Iterator[Violation]:
    actor = run.actor
    assert isinstance(actor, PpoClipConfig)
    if actor.clip_ratio_c is not None and actor.clip_ratio_c <= 1 + actor.clip_high:
        problem = f"must exceed 1 + the upper clip range, {1 + actor.clip_high:g}: it bounds ratios above that"
        yield Violation("actor.clip_ratio_c", actor.clip_ratio_c, problem, "Write 3.0, or null for no dual clip")


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
    rules=(_dual_clip_violations,),
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
