"""Who sends each row of a reshard plan, where several training ranks hold it; and who passes it on.

Without ``Sites`` all holders are alike and share the work.  With them, a row goes the shortest way there is:

1. from the training rank that receives for the rollout rank, if it holds the row itself;
2. else from one on the same node;
3. else from another node, but only once for each node: one of the rollout ranks there that want the same bytes gets
   them, and passes them on inside the node (``relay``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mcore_rl.ground.arrays import Int32Array, Int64Array
from mcore_rl.weights.sites import DIRECT, Sites


@dataclass(frozen=True)
class RowColumns:
    """Columns of a plan's rows, the largest first; each is [rows].

    sets: int32, the set of training ranks that hold the row.  num_bytes: int64.  target_rank: int32.  source: int32,
    the tensor that is sent from.  content: int32; rows of one source and one content are the same bytes.
    """

    sets: Int32Array
    num_bytes: Int64Array
    target_rank: Int32Array
    source: Int32Array
    content: Int32Array


def senders(
    rows: RowColumns, members: Sequence[Int64Array], world_size: int, sites: Sites | None
) -> tuple[Int32Array, Int32Array]:
    """(source_rank, relay) of each row: int32 [rows] each; see ``ReshardPlan``.

    members: the training ranks of each set.
    """
    loads = np.zeros(world_size, dtype=np.int64)
    relay = np.full(len(rows.sets), DIRECT, dtype=np.int32)
    if sites is None:
        return deal(rows.sets, rows.num_bytes, members, loads), relay
    holds = np.zeros((len(members), world_size), dtype=bool)
    for number, ranks in enumerate(members):
        holds[number, ranks] = True
    source = np.full(len(rows.sets), -1, dtype=np.int32)

    if sites.hosts:
        hosts = sites.landing[rows.target_rank]
        own = holds[rows.sets, hosts]
        source[own] = hosts[own]

    trainers = np.array(sites.trainers)
    near = [ranks[trainers[ranks] == node] for ranks in members for node in range(sites.num_nodes)]
    node = np.array(sites.rollout)[rows.target_rank]
    by_node = (rows.sets * sites.num_nodes + node).astype(np.int32)
    at_node = (source < 0) & np.array([len(ranks) > 0 for ranks in near])[by_node]
    places = np.flatnonzero(at_node)
    source[places] = deal(by_node[places], rows.num_bytes[places], near, loads)

    far = np.flatnonzero(source < 0)
    if len(far):
        source[far], relay[far] = _from_other_nodes(rows, far, node, members, loads)
    return source, relay


def _from_other_nodes(
    rows: RowColumns, far: Int64Array, node: Int64Array, members: Sequence[Int64Array], loads: Int64Array
) -> tuple[Int32Array, Int32Array]:
    """(source_rank, relay) of the rows ``far``: the first of those that bring the same bytes to a node brings them.

    Who is first changes from group to group, so that each brings in its share.
    """
    keys = (node[far].astype(np.int64) * (1 + rows.source.max()) + rows.source[far]) * (1 + rows.content.max())
    groups = np.unique(keys + rows.content[far], return_inverse=True)[1]
    order = np.argsort(groups, kind="stable")
    sizes = np.bincount(groups)
    first = order[np.cumsum(sizes) - sizes + np.arange(len(sizes)) % sizes]  # of each group, its place in ``far``
    leaders = far[first]
    by_size = np.argsort(leaders)
    brings = np.empty(len(sizes), dtype=np.int32)
    brings[by_size] = deal(rows.sets[leaders[by_size]], rows.num_bytes[leaders[by_size]], members, loads)
    relay = rows.target_rank[leaders][groups]
    relay[first] = DIRECT
    return brings[groups], relay


def grouped(numbers: NDArray[np.integer], count: int) -> tuple[Int64Array, Int64Array]:
    """(order, bounds): ``order[bounds[n] : bounds[n + 1]]`` are the places of ``n`` in ``numbers``, ascending."""
    small = numbers.astype(np.uint16) if count <= 2**16 else numbers  # a radix sort, for 16 bits
    order = np.argsort(small, kind="stable")
    return order, np.concatenate([[0], np.cumsum(np.bincount(numbers, minlength=count))])


def deal(sets: Int32Array, row_bytes: Int64Array, members: Sequence[Int64Array], loads: Int64Array) -> Int32Array:
    """The rank that sends each row: rows, the largest first, are dealt in turn to the members of their set.

    sets: the set of each row.  row_bytes: bytes of each row, descending.  members: the ranks of each set.  loads: bytes
    that each rank sends so far, to which this adds.  Any two members of a set then differ by at most its largest row in
    the bytes that they send of it (the difference telescopes).  The heaviest set is dealt first, and each set begins
    with the member that sends the least so far, so that the differences even out.
    """
    order, bounds = grouped(sets, len(members))
    source = np.empty(len(sets), dtype=np.int32)
    rows_of = [order[bounds[number] : bounds[number + 1]] for number in range(len(members))]
    totals = [int(row_bytes[rows].sum()) for rows in rows_of]
    for number in sorted(range(len(members)), key=lambda number: -totals[number]):
        rows = rows_of[number]
        ranks = members[number]
        if not len(rows):
            continue
        turn = ranks[np.argsort(loads[ranks], kind="stable")]
        source[rows] = turn[np.arange(len(rows)) % len(turn)]
        np.add.at(loads, source[rows], row_bytes[rows])
    return source
