"""Which response of a prompt is preferred to which (``Scope.pair``); the loss compares them, and has no advantages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Pair(NamedTuple):
    """Two answers to a prompt, by their places among its responses.  None: the row's own answer."""

    chosen: int | None
    rejected: int


def best_worst(scores: Sequence[float]) -> list[Pair]:
    """The response with the highest score and the one with the lowest, of equal ones the first; none if all are equal.

    With two responses, the pair of arXiv:2402.04792, algorithm 1.
    """
    places = range(len(scores))
    best, worst = (chosen(places, key=scores.__getitem__, default=0) for chosen in (max, min))
    return [Pair(best, worst)] if len(scores) and scores[best] > scores[worst] else []


def true_answer(scores: Sequence[float]) -> list[Pair]:
    """The row's own answer, preferred to each response (arXiv:2401.01335, eq. 4.7)."""
    return [Pair(None, place) for place in range(len(scores))]
