"""Whitening over the global batch: mean and deviation, computed once, and their application to advantages."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from mcore_rl.algorithms.advantages.ragged import Spread

EPSILON = 1e-8  # added to the variance, as in verl


@dataclass(frozen=True)
class Whitening:
    """``(x - mean) / deviation``, elementwise."""

    mean: float
    deviation: float

    @classmethod
    def of(cls, spread: Spread | None) -> Whitening:
        """The whitening by the mean and ``sqrt(variance + 1e-8)`` of all advantages.  spread: None if there are none.

        The variance is unbiased (Bessel's correction), as in verl; OpenAI's baselines divide by the count.  A single
        value becomes 0, and so do equal values.
        """
        if spread is None:
            return cls(0.0, 1.0)
        unbiased = spread.variance * spread.count / max(spread.count - 1, 1)
        return cls(spread.mean, math.sqrt(unbiased + EPSILON))

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` whitened, elementwise, in the dtype of ``x``."""
        return (x - self.mean) / self.deviation

    def of_spread(self, spread: Spread) -> Spread:
        """The statistics after whitening of values whose statistics were ``spread``."""
        return Spread(
            count=spread.count,
            mean=(spread.mean - self.mean) / self.deviation,
            variance=spread.variance / self.deviation**2,
            low=(spread.low - self.mean) / self.deviation,
            high=(spread.high - self.mean) / self.deviation,
        )
