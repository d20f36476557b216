"""A step's batch in Ray's store: the controller knows where each sequence lies, and reads no token of it.

Tokens are put there once.  What workers make of them, log-probs, values, advantages, is added where they made it, and
handed to whoever needs it next, in whatever layout: it travels between nodes without passing the controller.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from mcore_rl.runtime.shard import Pick, Portion

T = TypeVar("T")
Taking = tuple[bytes, list[Any]]  # a pickled Portion, and references to the shards that it is of


@dataclass(frozen=True, eq=False)
class _Column:
    """places: a reference to each shard.  where_S: the shard of each sequence, and its number there."""

    places: list[Any]
    where_S: list[Pick]


class SharedBatch:
    """Sequences of lengths_S tokens, of which nothing is there yet.  homes: those of each rank that trains them."""

    def __init__(self, lengths_S: Sequence[int], homes: Sequence[Sequence[int]]) -> None:
        self.lengths_S, self.homes = tuple(lengths_S), [list(home) for home in homes]
        self._columns: dict[str, _Column] = {}  # by field

    def add(self, members: Sequence[Sequence[int]], places: Sequence[Any], fields: Sequence[str]) -> None:
        """``fields`` of all sequences, in place of what was there.

        members: the sequences of each shard.  places: a reference to each.
        """
        where_S = [(0, 0)] * len(self.lengths_S)
        for shard, indices in enumerate(members):
            for place, index in enumerate(indices):
                where_S[index] = (shard, place)
        column = _Column(list(places), where_S)
        self._columns |= dict.fromkeys(fields, column)

    def takings(
        self, lots: Sequence[Sequence[Sequence[int]]], fields: Sequence[str], told: Sequence[object] | None = None
    ) -> list[Taking]:
        """For ``WorkerGroup.map``.  lots: of each rank, the sequences of each batch that it makes.

        fields: that it is to have, of those that are there.  told: of each rank, see ``Portion``.
        """
        names = [name for name in fields if name in self._columns]
        columns = list(dict.fromkeys(self._columns[name] for name in names))
        of_field = tuple((name, columns.index(self._columns[name])) for name in names)
        found = []
        for rank, of_rank in enumerate(lots):
            handed: dict[tuple[int, int], int] = {}  # column, shard -> its number among those that are handed over
            picks = tuple(
                tuple(
                    tuple(
                        (handed.setdefault((number, shard), len(handed)), place)
                        for shard, place in map(column.where_S.__getitem__, lot)
                    )
                    for number, column in enumerate(columns)
                )
                for lot in of_rank
            )
            portion = Portion(of_field, picks, None if told is None else told[rank])
            places = [columns[number].places[shard] for number, shard in handed]
            found.append((pickle.dumps(portion, protocol=pickle.HIGHEST_PROTOCOL), places))
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
