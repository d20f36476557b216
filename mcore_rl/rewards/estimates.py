"""What a model can do, told from samples: pass@k, maj@k, and how far the truth may be from the estimate.

Each function is of one prompt, but ``interval``, which is of all of them: prompts were drawn, so prompts are what a
confidence interval is about, however many responses each of them has.
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
    """value: the mean over prompts.  low, high: its ``CONFIDENCE`` interval, None where there is none to tell.

    method: ``wilson`` or ``bootstrap``.
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
    """1 where the most frequent answer is right, else 0; of a tie, the share of the tied answers that are right.

    Right answers are one answer, however they are spelled: the grader found all of them equal to the ground truth.
    None has no vote; where nobody votes it is 0.
    """
    votes = Counter((True, "") if right else (False, answer) for answer, right in zip(answers, correct, strict=True)
                    if right or answer is not None)  # fmt: skip
    if not votes:
        return 0.0
    most = max(votes.values())
    tied = [right for (right, _), count in votes.items() if count == most]
    return sum(tied) / len(tied)


def majority_at_k(answers: Sequence[str | None], correct: Sequence[bool], k: int) -> float:
    """The mean of ``majority`` over the consecutive, disjoint ``k`` of them, as many as there are whole.

    Unbiased for the majority of k fresh responses.  1 <= k <= len(answers).
    """
    assert 1 <= k <= len(answers) == len(correct)
    starts = range(0, len(answers) - k + 1, k)
    return fmean(majority(answers[start : start + k], correct[start : start + k]) for start in starts)


def interval(values: Sequence[float]) -> MeanEstimate:
    """The mean of one value a prompt, with its 95 % confidence interval.

    Where every prompt counts 0 or 1, Wilson's score interval (1927), which keeps its width at 0 and 1 where a bootstrap
    has none; else the percentile bootstrap over prompts (Efron, 1979), ``NUM_RESAMPLES`` resamples with a fixed seed.
    One prompt with another value says nothing of the spread.
    """
    assert values
    value, count = fmean(values), len(values)
    if all(each in (0.0, 1.0) for each in values):
        centre = (value + Z * Z / (2 * count)) / (1 + Z * Z / count)
        half = Z / (1 + Z * Z / count) * math.sqrt(value * (1 - value) / count + Z * Z / (4 * count * count))
        return MeanEstimate(value, max(0.0, centre - half), min(1.0, centre + half), "wilson")
    if count == 1:
        return MeanEstimate(value, None, None, "bootstrap")
    random, array = np.random.Generator(np.random.PCG64(SEED)), np.asarray(values, dtype=np.float64)
    means = np.array([array[random.integers(count, size=count)].mean() for _ in range(NUM_RESAMPLES)])
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return MeanEstimate(value, float(low), float(high), "bootstrap")
