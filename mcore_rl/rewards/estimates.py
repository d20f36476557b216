"""Estimates of a model's ability from samples: pass@k, maj@k, and their confidence interval.

Each function is for one prompt, except ``interval``, which takes one value per prompt: the prompts are the sample of a
population, so the interval is over prompts, however many responses each has.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

CONFIDENCE = 0.95
Z = 1.959963984540054  # standard normal quantile of (1 + CONFIDENCE) / 2
NUM_RESAMPLES = 2000
SEED = 0


@dataclass(frozen=True)
class MeanEstimate:
    """A mean and its confidence interval.

    value: the mean over prompts.  low, high: its ``CONFIDENCE`` interval; None if one prompt allows none.
    method: how the interval was computed, ``wilson`` or ``bootstrap``.
    """

    value: float
    low: float | None
    high: float | None
    method: str


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The chance that one of ``k`` responses is right: 1 - C(n - c, k) / C(n, k) (arXiv:2107.03374, eq. 1).

    Unbiased, and exact: in integers up to the one division.  1 <= k <= num_samples.
    """
    assert 1 <= k <= num_samples and 0 <= num_correct <= num_samples
    return 1 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def majority(answers: Sequence[str | None], correct: Sequence[bool]) -> float:
    """1 if the most frequent answer is right, else 0; in a tie, the share of the tied answers that are right.

    All right answers count as one answer, however they are spelled, since the grader judged them equal to the ground
    truth.  A wrong None has no vote; without votes the result is 0.
    """
    votes = Counter(
        (True, "") if right else (False, answer)
        for answer, right in zip(answers, correct, strict=True)
        if right or answer is not None
    )
    if not votes:
        return 0.0
    most = max(votes.values())
    tied = [right for (right, _), count in votes.items() if count == most]
    return sum(tied) / len(tied)


def majority_at_k(answers: Sequence[str | None], correct: Sequence[bool], k: int) -> float:
    """The mean of ``majority`` over consecutive, disjoint blocks of ``k`` answers; an incomplete block is left out.

    Unbiased for the majority of k fresh responses.  1 <= k <= len(answers).
    """
    assert 1 <= k <= len(answers) == len(correct)
    starts = range(0, len(answers) - k + 1, k)
    return fmean(majority(answers[start : start + k], correct[start : start + k]) for start in starts)


def interval(values: Sequence[float]) -> MeanEstimate:
    """The mean of one value per prompt, with its 95 % confidence interval.

    If all values are 0 or 1: Wilson's score interval (1927), which has a width even at means of 0 and 1, where a
    bootstrap has none.  Otherwise: the percentile bootstrap over prompts (Efron, 1979), ``NUM_RESAMPLES`` resamples
    with a fixed seed; for one prompt there is no interval.
    """
    assert values
    value = fmean(values)
    count = len(values)
    if all(each in (0.0, 1.0) for each in values):
        centre = (value + Z * Z / (2 * count)) / (1 + Z * Z / count)
        half = Z / (1 + Z * Z / count) * math.sqrt(value * (1 - value) / count + Z * Z / (4 * count * count))
        return MeanEstimate(value, max(0.0, centre - half), min(1.0, centre + half), "wilson")
    if count == 1:
        return MeanEstimate(value, None, None, "bootstrap")
    random = np.random.Generator(np.random.PCG64(SEED))
    array = np.asarray(values, dtype=np.float64)
    means = np.array([array[random.integers(count, size=count)].mean() for _ in range(NUM_RESAMPLES)])
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return MeanEstimate(value, float(low), float(high), "bootstrap")
