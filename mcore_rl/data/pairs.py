"""Sequences that a loss looks at together, and that therefore stay together: on one rank and in one microbatch.

A pair is two sequences with one key: an answer that was preferred and one that was not (DPO, arXiv:2305.18290), or one
of the data and one of the model (SPIN, arXiv:2401.01335).  Nothing here places anything: ``placed_whole`` lets
``balance`` and ``packing`` place units, a pair or a sequence by itself, and gives back their sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Cost = TypeVar("Cost", int, float)

MEMBERS = 2  # of a pair


def units_of(pairs_S: Sequence[int | None]) -> list[list[int]]:
    """Which sequences stay together: ascending lists of indices, by their first.

    pairs_S: the key of each sequence's pair, None where it has none.  AssertionError: a key of one sequence, or of
    more than two.
    """
    units: dict[tuple[str, int], list[int]] = {}
    for index, key in enumerate(pairs_S):
        units.setdefault(("sequence", index) if key is None else ("pair", key), []).append(index)
    for (kind, key), members in units.items():
        assert kind == "sequence" or len(members) == MEMBERS, f"pair {key} has {len(members)} sequences"
    return list(units.values())


def placed_whole(
    costs: Sequence[Cost], units: Sequence[Sequence[int]], place: Callable[[list[Cost]], list[list[int]]]
) -> list[list[int]]:
    """The indices of ``costs`` as ``place`` puts the units, whose costs are the sums of their sequences'; ascending."""
    placed = place([sum(costs[index] for index in unit) for unit in units])
    return [sorted(index for unit in chosen for index in units[unit]) for chosen in placed]
