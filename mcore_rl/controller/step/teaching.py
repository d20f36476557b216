"""Scores each sequence of a step with its own teacher, where there are several (``Teachers``).

One call of the workers, in which they take one teacher after the other: each scores its own sequences alone, and all
ranks have some of every teacher's, since the ranks of a mixture of experts compute a pass together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mcore_rl.config.roles import Teachers, snapshot_of
from mcore_rl.config.stages import Pass
from mcore_rl.data.balance import balance
from mcore_rl.runtime.shared_batch import SharedBatch
from mcore_rl.runtime.train_group import TrainGroup
from mcore_rl.types import TAUGHT_BY


async def score_by_teacher(
    stage: Pass, group: TrainGroup, shared: SharedBatch, teachers: Teachers, temperature: float
) -> None:
    """Adds the log-probs or hidden states that the teachers make to the batch."""
    teacher_S = np.asarray(teachers.numbers)[shared.extra_S[TAUGHT_BY].astype(np.int64)]
    dp = group.layout.dp
    taught = assignments(shared.costs_S, teacher_S, dp)
    batches = [[of_ranks[rank] for of_ranks in taught.values()] for rank in range(dp)]
    same: list[Sequence[int] | None] = [None] * dp  # the fields are of the sequences that are scored
    inputs = shared.shard_refs(batches, stage.reads, same)
    snapshots = [snapshot_of(teacher) for teacher in taught]
    _, shards = await group.score(inputs, stage.makes, temperature=temperature, snapshots=snapshots)
    members = [[sequence for batch in of_rank for sequence in batch] for of_rank in batches]
    shared.add(members, shards, stage.makes)


def assignments(costs_S: Sequence[float], teacher_S: NDArray[np.int64], num_ranks: int) -> dict[int, list[list[int]]]:
    """For each teacher that has sequences, those that each rank scores with it, balanced by cost.

    Every rank has one or more: of a teacher with fewer sequences than ranks, some are scored more than once.
    """
    taught = dict[int, list[list[int]]]()
    for teacher in sorted(set(teacher_S.tolist())):
        own = np.flatnonzero(teacher_S == teacher).tolist()
        members = own + [own[number % len(own)] for number in range(len(own), num_ranks)]
        ranks = balance([costs_S[sequence] for sequence in members], num_ranks)
        taught[teacher] = [[members[place] for place in of_rank] for of_rank in ranks]
    return taught
