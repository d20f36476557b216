"""Which data-parallel rank trains which sequence: costs in, lists of indices out.

Every rank waits for the slowest, so what counts is the largest total cost over the mean.  Equal counts of sequences
are the field's habit (verl's ``equal_size``): they make alike what costs by the sequence.

Nothing here moves a tensor or knows a microbatch; ``packing`` cuts a rank's share.

Invariant: every index stands on exactly one rank, every rank has at least one, the indices of a rank ascend, and equal
input gives equal output.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from mcore_rl.ground.arrays import Float64Array, Int64Array

TOLERANCE = 1e-3  # max/mean - 1 below which nothing is gained: a step's time varies more
MAX_ROUNDS = 100  # of swaps; about 10 are needed
MAX_CANDIDATES = 32  # sequences of a rank that a round of swaps looks at
NOTHING = -1  # the empty place of a rank that has one sequence fewer than others


def workload(lengths: Sequence[int], hidden_size: int) -> list[float]:
    """``L + L^2 / (12 H)`` for each length: what a sequence costs, in tokens without attention.

    Per layer and token, dense projections take about ``24 H^2`` FLOPs and causal attention over ``L`` tokens ``2 H L``
    (Narayanan et al., arXiv:2104.04473, appendix, halved by the causal mask).  The square tells only from several
    thousand tokens on.

    lengths: tokens.  hidden_size: H of the model.
    """
    assert hidden_size >= 1, f"hidden_size={hidden_size} must be positive"
    return [length + length * length / (12 * hidden_size) for length in lengths]


def balance(costs: Sequence[int] | Sequence[float], num_ranks: int, *, equal_size: bool = True) -> list[list[int]]:
    """The indices of ``costs``, one list a rank, such that the largest total is close to the mean.

    equal_size: counts differ by at most one.  Longest first, in rounds of one sequence for each rank, the longest of a
    round to the least loaded rank; then heavy ranks swap sequences with light ones, as long as that gains anything.
    Without it, longest processing time first (R. L. Graham, SIAM J. Appl. Math. 17, 1969): within 4/3 of the best, and
    better than equal counts where few sequences of very different lengths meet many ranks.

    costs: positive, lengths in tokens or a ``workload``; at least ``num_ranks`` of them: AssertionError.
    """
    assert 1 <= num_ranks <= len(costs), f"{len(costs)} sequences for {num_ranks} ranks: each rank needs one"
    cost = np.asarray(costs, dtype=np.float64)
    assert cost.min() > 0, "costs must be positive"
    if not equal_size:
        return _least_loaded(cost, num_ranks)
    members = _swapped(cost, _in_rounds(cost, num_ranks))
    return [sorted(int(index) for index in row if index != NOTHING) for row in members]


def imbalance(costs: Sequence[int] | Sequence[float], shards: Sequence[Sequence[int]]) -> float:
    """The largest total cost of ``shards`` over their mean, at least 1: what waiting for the slowest rank costs."""
    totals = [sum(costs[index] for index in shard) for shard in shards]
    return max(totals) * len(totals) / sum(totals)


def _in_rounds(cost: Float64Array, num_ranks: int) -> Int64Array:
    """Indices, one row a rank; only the last column holds NOTHING."""
    order = np.argsort(-cost, kind="stable")
    members = np.full((num_ranks, -(-len(cost) // num_ranks)), NOTHING, dtype=np.int64)
    loads = np.zeros(num_ranks)
    for column in range(members.shape[1]):
        longest_first = order[column * num_ranks : (column + 1) * num_ranks]
        least_loaded = np.argsort(loads, kind="stable")[: len(longest_first)]
        members[least_loaded, column] = longest_first
        loads[least_loaded] += cost[longest_first]
    return members


def _swapped(cost: Float64Array, members: Int64Array) -> Int64Array:
    """The heaviest rank and the lightest, the second heaviest and the second lightest and so on swap one sequence each.

    Each pair takes the swap that leaves the smallest difference.  An empty place counts as a sequence that costs
    nothing, so that a rank may also give one away; no rank gets a second empty place.
    """
    num_ranks, width = members.shape
    with_nothing = np.append(cost, 0.0)  # what index NOTHING finds
    limit = cost.sum() / num_ranks * (1 + TOLERANCE)
    columns = np.unique(np.linspace(0, width - 1, min(width, MAX_CANDIDATES)).astype(np.int64))
    for _ in range(MAX_ROUNDS):
        loads = with_nothing[members].sum(axis=1)
        if loads.max() <= limit:
            break
        descending = np.argsort(-loads, kind="stable")
        heavy = descending[: num_ranks // 2]
        light = descending[::-1][: num_ranks // 2]
        from_heavy = members[np.ix_(heavy, columns)]
        from_light = members[np.ix_(light, columns)]
        gap = loads[heavy] - loads[light]
        moved = with_nothing[from_heavy][:, :, None] - with_nothing[from_light][:, None, :]
        left = np.abs(gap[:, None, None] - 2 * moved)
        short = (members[heavy] == NOTHING).any(axis=1) & (members[light] == NOTHING).any(axis=1)
        empty = (from_heavy == NOTHING)[:, :, None] | (from_light == NOTHING)[:, None, :]
        left[short[:, None, None] & empty] = np.inf
        best = left.reshape(len(heavy), -1).argmin(axis=1)
        gains = left.reshape(len(heavy), -1)[np.arange(len(heavy)), best] < gap
        if not gains.any():
            break
        here = (heavy[gains], columns[best[gains] // len(columns)])
        there = (light[gains], columns[best[gains] % len(columns)])
        members[here], members[there] = members[there], members[here]
    return members


def _least_loaded(cost: Float64Array, num_ranks: int) -> list[list[int]]:
    shards: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0.0, rank) for rank in range(num_ranks)]  # a heap already
    for index in np.argsort(-cost, kind="stable").tolist():
        load, rank = loads[0]
        shards[rank].append(index)
        heapq.heapreplace(loads, (load + float(cost[index]), rank))
    return [sorted(shard) for shard in shards]
