"""Which response of a prompt is preferred to which (``Scope.pair``); the loss compares them, and has no advantages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from mcore_rl.algorithms.advantages.groups import ranked


class Pair(NamedTuple):
    """Two answers to a prompt, by their places among its responses.  None: the row's own answer."""

    chosen: int | None
    rejected: int


def best_worst(scores: Sequence[float]) -> list[Pair]:
    """The response with the highest score and the one with the lowest, of equal ones the first; none if all are equal.

    Scores that differ by rounding alone are equal, so that 0.1 + 0.2 is not preferred to 0.3.  With two responses, the
    pair of arXiv:2402.04792, algorithm 1.
    """
    if not scores:
        return []
    compared = ranked(torch.tensor(scores, dtype=torch.float64), max(abs(score) for score in scores)).tolist()
    places = range(len(scores))
    best, worst = (chosen(places, key=compared.__getitem__) for chosen in (max, min))
    return [Pair(best, worst)] if compared[best] > compared[worst] else []


def true_answer(scores: Sequence[float]) -> list[Pair]:
    """The row's own answer, preferred to each response (arXiv:2401.01335, eq. 4.7)."""
    return [Pair(None, place) for place in range(len(scores))]
