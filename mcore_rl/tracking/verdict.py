"""What was learned: validation accuracy with its uncertainty, and whether the gain is more than chance.

The unit of evidence is the prompt: several samples of one prompt are averaged first, since they are not independent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Z_95 = 1.959963984540054  # the 97.5 % quantile of the normal distribution
SIGNIFICANT = 0.05


@dataclass(frozen=True)
class Accuracy:
    """Validation accuracy of one data source at one step.  by_prompt: share of right samples of each prompt."""

    step: int
    by_prompt: Mapping[str, float]

    @property
    def num_prompts(self) -> int:
        """Number of validated prompts."""
        return len(self.by_prompt)

    @property
    def mean(self) -> float:
        """Mean over prompts, in [0, 1]."""
        return math.fsum(self.by_prompt.values()) / self.num_prompts

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of the mean."""
        return wilson(self.mean * self.num_prompts, self.num_prompts)


@dataclass(frozen=True)
class Gain:
    """The change from the first validation to the last.

    points: difference of the accuracies, in [-1, 1].  p: probability of so large a difference by chance; None if the
    prompts differ.  significant: at 5 %.  basis: the test, in words.
    """

    points: float
    p: float | None
    significant: bool
    basis: str


def wilson(successes: float, trials: int, z: float = Z_95) -> tuple[float, float]:
    """Wilson's score interval of a proportion (J. Am. Stat. Assoc. 22, 1927), 95 % by default.

    (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n) with p = successes / trials, n = trials; (0, 1) for none.
    """
    if trials == 0:
        return 0.0, 1.0
    p = successes / trials
    z2 = z * z
    middle = p + z2 / (2 * trials)
    half = z * math.sqrt(max(p * (1 - p) / trials + z2 / (4 * trials * trials), 0.0))
    scale = 1 + z2 / trials
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def sign_test(ups: int, downs: int) -> float:
    """Two-sided exact p-value of ``ups`` against ``downs`` under even odds (McNemar's exact test); 1 for no change."""
    trials = ups + downs
    fewer = min(ups, downs)
    if trials == 0:
        return 1.0
    tail = math.fsum(math.exp(_log_binomial(trials, k) - trials * math.log(2)) for k in range(fewer + 1))
    return min(1.0, 2 * tail)


def gain(first: Accuracy, last: Accuracy) -> Gain:
    """How far ``last`` is above ``first``.

    Equal prompts are compared one by one; for different prompts the two intervals are combined as independent ones
    (Newcombe, Stat. Med. 17, 1998, method 10).
    """
    points = last.mean - first.mean
    if first.by_prompt.keys() == last.by_prompt.keys():
        changes = [last.by_prompt[prompt] - first.by_prompt[prompt] for prompt in first.by_prompt]
        ups = sum(change > 0 for change in changes)
        downs = sum(change < 0 for change in changes)
        p = sign_test(ups, downs)
        basis = f"exact sign test on the same {first.num_prompts} prompts: {ups} better, {downs} worse"
        return Gain(points, p, p < SIGNIFICANT, basis)
    (low_0, high_0), (low_1, high_1) = first.interval, last.interval
    low = points - math.hypot(last.mean - low_1, high_0 - first.mean)
    high = points + math.hypot(high_1 - last.mean, first.mean - low_0)
    basis = f"different prompts, so the 95 % interval of the difference: {100 * low:+.1f} to {100 * high:+.1f} points"
    return Gain(points, None, low > 0 or high < 0, basis)


def best(accuracies: Sequence[Accuracy]) -> Accuracy:
    """The highest accuracy, the first of equals.  It was picked for being high, so no test is made of it."""
    return max(accuracies, key=lambda accuracy: accuracy.mean)


def _log_binomial(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
