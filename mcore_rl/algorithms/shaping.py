"""Which of a step's samples are trained: DAPO's two filters (arXiv:2503.14476, sections 3.2 and 3.4), and PRIME's."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from statistics import fmean

import torch
from torch import Tensor

from mcore_rl.algorithms.advantages.groups import TIE, PromptGroups
from mcore_rl.algorithms.advantages.pairs import best_worst
from mcore_rl.algorithms.advantages.ragged import at_tokens
from mcore_rl.config.algorithm import AlgorithmConfig, FilterGroupsConfig
from mcore_rl.config.algorithm_object import Scope
from mcore_rl.config.algorithm_registry import estimator


def has_signal(scores: Sequence[float], truncated: Sequence[bool], config: AlgorithmConfig) -> bool:
    """Whether the group trains anything, and the mean of its scores is within ``filter_groups`` (arXiv:2502.01456).

    An estimator of a group's scores is asked itself: whether it gives any trained response an advantage other than 0.
    A group of pairs trains something if two of its trained responses are a pair.  What needs more than these scores (a
    critic, parts of the reward, other groups, a teacher) is told by DAPO's own rule: the scores differ.

    Args:
        scores: ``filter_groups.metric`` of each response to one prompt.
        truncated: for each response, whether it was cut off at its length limit.
        config: says whether such responses are trained, and whether their scores stay in the baseline.
    """
    chosen = estimator(config.adv_estimator)
    trained = [not (cut and config.mask_truncated) for cut in truncated]
    masked_too = config.masked_in_baseline and chosen.scope is not Scope.pair
    members = [kept or masked_too for kept in trained]
    compared = [x for x, member in zip(scores, members, strict=True) if member]
    if not any(trained) or not _within(fmean(compared), config.filter_groups):
        return False
    if chosen.scope is Scope.pair:
        return chosen.answers or bool(chosen.load()(compared))
    if not chosen.tells_signal:
        return bool(best_worst(compared))
    groups = PromptGroups.of(
        torch.zeros(len(scores), dtype=torch.int64), torch.tensor(scores), torch.tensor(members).long()
    )
    advantages_S = chosen.load()(groups, config)
    return bool((advantages_S.abs() > TIE * max(1.0, float(advantages_S.abs().max())))[torch.tensor(trained)].any())


def _within(mean: float, filtering: FilterGroupsConfig) -> bool:
    lower = -inf if filtering.lower is None else filtering.lower
    return lower <= mean <= (inf if filtering.upper is None else filtering.upper)


def mask_truncated(mask_T: Tensor, lengths_S: Sequence[int], truncated_S: Tensor) -> Tensor:
    """Overlong filtering: ``mask_T`` without the responses that were cut off at their limit (``truncated_S``, bool)."""
    return mask_T & ~at_tokens(truncated_S, lengths_S)
