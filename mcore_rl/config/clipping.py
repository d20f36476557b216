"""Settings of the policy losses that clip ratios, and what contradicts them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from mcore_rl.config.bounds import Interval, NonNegativeFloat
from mcore_rl.config.roles import ActorConfig
from mcore_rl.ground.errors import Violation

if TYPE_CHECKING:
    from mcore_rl.config.run import RunConfig


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


def dual_clip_violations(run: RunConfig) -> Iterator[Violation]:
    """Find a dual clip below the upper clip range."""
    actor = run.actor
    assert isinstance(actor, PpoClipConfig)
    if actor.clip_ratio_c is not None and actor.clip_ratio_c <= 1 + actor.clip_high:
        problem = f"must exceed 1 + the upper clip range, {1 + actor.clip_high:g}: it bounds ratios above that"
        yield Violation("actor.clip_ratio_c", actor.clip_ratio_c, problem, "Write 3.0, or null for no dual clip")
