"""A step's batch in Ray's store: the controller knows where each sequence lies, and reads no token of it.

Tokens are put there once.  What workers make of them, log-probs, values, advantages, is added where they made it, and
handed to whoever needs it next, in whatever layout: it travels between nodes without passing the controller.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

import torch
from ray import ObjectRef
from torch import Tensor

from mcore_rl.runtime.shard import Pick, Portion, Shard

T = TypeVar("T")
X = TypeVar("X")
ShardRef = ObjectRef[Shard]


@dataclass(frozen=True)
class ShardRefs(Generic[X]):
    """The batches of one data-parallel rank, as it is handed them.

    portion: a pickled ``Portion`` with a payload of type ``X``.  shards: references to the shards that it is of.
    """

    portion: bytes
    shards: list[ShardRef]


@dataclass(frozen=True, eq=False)
class _Column:
    """shards: a reference to each.  where_S: the shard of each sequence, and its number there."""

    shards: list[ShardRef]
    where_S: list[Pick]


class SharedBatch:
    """An empty batch of sequences of lengths_S tokens; ``assignment[r]`` lists the sequences that rank r trains.

    pairs_S: see ``TrainBatch``.
    """

    def __init__(
        self,
        lengths_S: Sequence[int],
        assignment: Sequence[Sequence[int]],
        pairs_S: tuple[int | None, ...] | None = None,
    ) -> None:
        self.lengths_S, self.assignment = tuple(lengths_S), [list(each) for each in assignment]
        self.pairs_S = pairs_S
        self._columns: dict[str, _Column] = {}  # by field

    def add(self, members: Sequence[Sequence[int]], shards: Sequence[ShardRef], fields: Sequence[str]) -> None:
        """Add ``fields`` of all sequences, in place of what was there.

        members: the sequences of each shard.  shards: a reference to each.
        """
        where_S = [(0, 0)] * len(self.lengths_S)
        for shard, indices in enumerate(members):
            for place, index in enumerate(indices):
                where_S[index] = (shard, place)
        column = _Column(list(shards), where_S)
        self._columns |= dict.fromkeys(fields, column)

    def shard_refs(
        self, batches: Sequence[Sequence[Sequence[int]]], fields: Sequence[str], payloads: Sequence[X]
    ) -> list[ShardRefs[X]]:
        """What each data-parallel rank is handed.

        batches: of each rank, the sequences of each of its batches.  fields: that the batches have, of those that are
        there.  payloads: of each rank.
        """
        names = [name for name in fields if name in self._columns]
        columns = list(dict.fromkeys(self._columns[name] for name in names))
        of_field = tuple((name, columns.index(self._columns[name])) for name in names)
        found = list[ShardRefs[X]]()
        for payload, of_rank in zip(payloads, batches, strict=True):
            handed: dict[tuple[int, int], int] = {}  # column, shard -> its number among those that are handed over
            picks = tuple(
                tuple(
                    tuple(
                        (handed.setdefault((number, shard), len(handed)), place)
                        for shard, place in map(column.where_S.__getitem__, batch)
                    )
                    for number, column in enumerate(columns)
                )
                for batch in of_rank
            )
            keys = self.pairs_S
            pairs = None if keys is None else tuple(tuple(keys[sequence] for sequence in batch) for batch in of_rank)
            portion = pickle.dumps(Portion(of_field, picks, payload, pairs), protocol=pickle.HIGHEST_PROTOCOL)
            found.append(ShardRefs(portion, [columns[number].shards[shard] for number, shard in handed]))
        return found

    def in_order(self, members: Sequence[Sequence[int]], found: Sequence[T]) -> T:
        """Records of tensors [S] (or records of them), one of each of ``members``, as one in the batch's order."""
        order = torch.empty(len(self.lengths_S), dtype=torch.int64)
        order[[index for indices in members for index in indices]] = torch.arange(len(order))
        joined: T = _in_order(found, order)
        return joined


def _in_order(parts: Sequence[Any], order: Tensor) -> Any:
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(list(parts))[order]
    if first is None:
        return None
    names = [each.name for each in fields(first)]
    return type(first)(**{name: _in_order([getattr(part, name) for part in parts], order) for name in names})
