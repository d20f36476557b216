"""Which sequences share a microbatch: integers in, lists of indices out.

A sequence costs the tokens it occupies in a packed microbatch, ``padded_length(length, multiple)``; a microbatch holds
whole sequences that cost at most the token budget together.  Nothing here sees a tensor, a process group or a
configuration, and nothing orders sequences over data-parallel ranks.

Invariant: every index stands in exactly one microbatch, the indices of a microbatch ascend, microbatches ascend by
their first index with empty ones last, and equal input gives equal output.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

from mcore_rl.ground.errors import Violation


def padded_length(length: int, multiple: int) -> int:
    """``length`` rounded up to a multiple of ``multiple``, both in tokens."""
    assert multiple >= 1, f"multiple={multiple} must be positive"
    return -(-length // multiple) * multiple


def budget_violations(
    costs: Sequence[int], budget: int, key: str = "microbatch_tokens", unit: str = "sequence", what: str = "tokens"
) -> list[Violation]:
    """The violation that some ``costs`` exceed ``budget``; names the largest and what it needs.

    key: where the user wrote the budget.  unit: what has these costs.  what: they count.
    """
    too_long = sum(cost > budget for cost in costs)
    if too_long == 0:
        return []
    longest = max(costs)
    problem = f"{too_long} of {len(costs)} {unit}s do not fit; the longest, {unit} {costs.index(longest)}"
    return [Violation(key, budget, f"{problem}, takes {longest} {what}", f"Write {longest} or more")]


def pack(costs: Sequence[int], budget: int) -> list[list[int]]:
    """Whole sequences into few microbatches of at most ``budget`` tokens: best-fit decreasing, O(n log n) comparisons.

    From the longest sequence to the shortest (ties: the lower index first), each goes where it leaves the least room
    (ties: the older microbatch).  At most 11/9 of the fewest possible plus 4 (Johnson, Demers, Ullman, Garey, Graham,
    SIAM J. Comput. 3, 1974); for sequences that are short beside the budget, ``ceil(sum / budget)`` unless those would
    be all but full.

    costs: positive tokens, none above ``budget`` (see ``budget_violations``): AssertionError.
    """
    assert all(0 < cost <= budget for cost in costs), f"costs must lie in [1, {budget}]; see budget_violations"
    smallest = min(costs, default=0)
    microbatches: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (tokens left, microbatch), ascending, where any sequence might still fit
    for index in _longest_first(costs, range(len(costs))):
        tightest = bisect_left(rooms, (costs[index], 0))
        if tightest == len(rooms):
            left = budget
            place = len(microbatches)
            microbatches.append([])
        else:
            left, place = rooms.pop(tightest)
        microbatches[place].append(index)
        if left - costs[index] >= smallest:
            insort(rooms, (left - costs[index], place))
    return _in_order(microbatches)


def pack_into(costs: Sequence[int], num_microbatches: int, budget: int) -> list[list[int]]:
    """Exactly ``num_microbatches`` microbatches of at most ``budget`` tokens, balanced; empty where sequences run out.

    Longest processing time first (R. L. Graham, SIAM J. Appl. Math. 17, 1969): the largest load is at most 4/3 of the
    smallest possible, and within one sequence of the smallest load.  Where that breaks a tight budget, MULTIFIT
    (Coffman, Garey and Johnson, SIAM J. Comput. 7, 1978): the smallest bound found for which ``pack`` needs few enough.

    Succeeds wherever ``num_microbatches >= len(pack(costs, budget))``; fewer may be impossible: AssertionError.
    """
    assert num_microbatches >= 1, f"num_microbatches={num_microbatches} must be positive"
    assert all(0 < cost <= budget for cost in costs), f"costs must lie in [1, {budget}]; see budget_violations"
    balanced = _longest_to_least_loaded(costs, range(len(costs)), num_microbatches)
    if max(_loads(costs, balanced)) <= budget:
        return _in_order(balanced)

    best = pack(costs, budget)
    assert len(best) <= num_microbatches, f"{num_microbatches} microbatches of {budget} tokens hold too little"
    too_small = max(-(-sum(costs) // num_microbatches), max(costs)) - 1
    enough = budget
    while enough - too_small > 1:
        bound = (too_small + enough) // 2
        candidate = pack(costs, bound)
        if len(candidate) <= num_microbatches:
            best = candidate
            enough = bound
        else:
            too_small = bound
    return _in_order(_split_heaviest(costs, best, num_microbatches))


def chunk_fixed(counts: Sequence[int], size: int) -> list[list[int]]:
    """Units in order, as many to a microbatch as have at most ``size`` sequences together.

    counts: sequences of each unit, 1 for one by itself; none above ``size``: AssertionError.
    """
    assert all(1 <= count <= size for count in counts), f"counts must lie in [1, {size}]"
    chunks: list[list[int]] = []
    room = 0
    for unit, count in enumerate(counts):
        if count > room:
            chunks.append([])
            room = size
        chunks[-1].append(unit)
        room -= count
    return chunks


def _longest_first(costs: Sequence[int], members: Iterable[int]) -> list[int]:
    return sorted(members, key=lambda index: (-costs[index], index))


def _loads(costs: Sequence[int], microbatches: Iterable[Sequence[int]]) -> list[int]:
    return [sum(costs[index] for index in members) for members in microbatches]


def _longest_to_least_loaded(costs: Sequence[int], members: Iterable[int], num_microbatches: int) -> list[list[int]]:
    microbatches: list[list[int]] = [[] for _ in range(num_microbatches)]
    loads = [(0, place) for place in range(num_microbatches)]  # a heap already
    for index in _longest_first(costs, members):
        load, place = loads[0]
        microbatches[place].append(index)
        heapq.heapreplace(loads, (load + costs[index], place))
    return microbatches


def _split_heaviest(costs: Sequence[int], microbatches: list[list[int]], num_microbatches: int) -> list[list[int]]:
    """As many as asked for, by halving the heaviest that holds several; needs at least as many sequences."""
    result = list(microbatches)
    while len(result) < num_microbatches:
        loads = _loads(costs, result)
        heaviest = max((place for place in range(len(result)) if len(result[place]) > 1), key=loads.__getitem__)
        result += _longest_to_least_loaded(costs, result.pop(heaviest), 2)
    return result


def _in_order(microbatches: Iterable[list[int]]) -> list[list[int]]:
    return sorted((sorted(members) for members in microbatches), key=lambda members: (not members, members))
