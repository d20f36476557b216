"""Whitening over the global batch: its two numbers, which are made once, and what they do to an advantage."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from mcore_rl.algorithms.ragged import Spread

EPSILON = 1e-8  # added to the variance, as in verl


@dataclass(frozen=True)
class Whitening:
    """``(x - mean) / deviation``, elementwise."""

    mean: float
    deviation: float

    @classmethod
    def of(cls, spread: Spread | None) -> Whitening:
        """By the mean and ``sqrt(variance + 1e-8)`` of all advantages; None: there are none.

        The variance is the unbiased one (Bessel's correction), as in verl; OpenAI's baselines divide by the count.  One
        value has no variance and becomes 0, as do equal values.
        """
        if spread is None:
            return cls(0.0, 1.0)
        unbiased = spread.variance * spread.count / max(spread.count - 1, 1)
        return cls(spread.mean, math.sqrt(unbiased + EPSILON))

    def __call__(self, x: Tensor) -> Tensor:
        """``x``, whitened, in its dtype."""
        return (x - self.mean) / self.deviation

    def of_spread(self, spread: Spread) -> Spread:
        """What whitening makes of ``spread``."""
        return Spread(
            count=spread.count,
            mean=(spread.mean - self.mean) / self.deviation,
            variance=spread.variance / self.deviation**2,
            low=(spread.low - self.mean) / self.deviation,
            high=(spread.high - self.mean) / self.deviation,
        )
