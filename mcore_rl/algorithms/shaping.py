"""Which of a step's samples are trained: DAPO's two filters (arXiv:2503.14476, sections 3.2 and 3.4), and PRIME's."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from statistics import fmean

from torch import Tensor

from mcore_rl.algorithms.ragged import at_tokens
from mcore_rl.config.algorithm import AlgorithmConfig, FilterGroupsConfig
from mcore_rl.config.algorithm_object import Scope
from mcore_rl.config.algorithm_registry import estimator


def has_signal(scores: Sequence[float], truncated: Sequence[bool], config: AlgorithmConfig) -> bool:
    """Whether an estimator that compares groups gives any trained response of this group an advantage other than 0.

    Or makes a pair of two of them, which then are trained.  And whether the mean of the scores is within the bounds of
    ``filter_groups`` (arXiv:2502.01456).

    Args:
        scores: ``filter_groups.metric`` of each response to one prompt.
        truncated: for each response, whether it was cut off at its length limit.
        config: says whether such responses are trained, and whether their scores stay in the baseline.
    """
    trained = [not (cut and config.mask_truncated) for cut in truncated]
    pairs = estimator(config.adv_estimator).scope is Scope.pair
    masked_too = config.masked_in_baseline and not pairs
    compared = [x for x, kept in zip(scores, trained, strict=True) if kept or masked_too]
    return any(trained) and min(compared) < max(compared) and _within(fmean(compared), config.filter_groups)


def _within(mean: float, filtering: FilterGroupsConfig) -> bool:
    lower = -inf if filtering.lower is None else filtering.lower
    return lower <= mean <= (inf if filtering.upper is None else filtering.upper)


def mask_truncated(mask_T: Tensor, lengths_S: Sequence[int], truncated_S: Tensor) -> Tensor:
    """Overlong filtering: ``mask_T`` without the responses that were cut off at their limit (``truncated_S``, bool)."""
    return mask_T & ~at_tokens(truncated_S, lengths_S)
