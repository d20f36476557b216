"""Sequences of a batch as they lie in Ray's store, and which of them a rank makes its batches of.

A shard holds some fields of some sequences.  Different fields may lie in different shards, of different sequences: what
the trainer says of a token stays where it was said.  A rank is handed all shards that hold something of its sequences,
and a ``Portion`` that says which sequences of them its batches are made of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pickle import PickleBuffer
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mcore_rl.types import TrainBatch

X = TypeVar("X")
R = TypeVar("R")


@dataclass(frozen=True)
class Shard:
    """fields: of each field of ``TrainBatch`` that is there, every sequence's part."""

    fields: dict[str, list[NDArray[Any]]]

    @classmethod
    def of(cls, lengths_S: Sequence[int], **tensors_T: Tensor | None) -> Shard:
        """Sequences laid end to end; nothing is copied.  A field that is None is left out."""
        ends = np.cumsum(lengths_S)[:-1]
        there = {name: tensor.numpy() for name, tensor in tensors_T.items() if tensor is not None}
        return cls({name: np.split(array, ends) for name, array in there.items()})

    def __reduce__(self) -> tuple[Callable[..., Shard], tuple[object, ...]]:
        """As plain buffers, which Ray's pickler takes as they are: for an array it calls back into Python.

        So the views are written once, into Ray's store.
        """
        rows = {name: (parts[0].dtype.str, parts[0].shape[1:]) for name, parts in self.fields.items()}
        buffers = [[PickleBuffer(part.data) for part in parts] for parts in self.fields.values()]
        return _shard, (rows, buffers)


def _shard(rows: dict[str, tuple[str, tuple[int, ...]]], buffers: list[list[memoryview]]) -> Shard:
    """rows: type of an element and shape of a token's row, of each field."""
    return Shard(
        {
            name: [np.frombuffer(part, dtype).reshape(-1, *shape) for part in parts]
            for (name, (dtype, shape)), parts in zip(rows.items(), buffers, strict=True)
        }
    )


def shards_of(batch: TrainBatch, members: Sequence[Sequence[int]]) -> list[Shard]:
    """The sequences of ``batch``, on the CPU, that each of ``members`` lists, in that order; nothing is copied."""
    starts = batch.offsets_S
    arrays = [(name, tensor.numpy()) for name, tensor in batch.token_fields()]
    found = []
    for indices in members:
        parts = [slice(starts[i], starts[i] + batch.lengths_S[i]) for i in indices]
        found.append(Shard({name: [array[part] for part in parts] for name, array in arrays}))
    return found


Pick = tuple[int, int]  # a shard, of those that are handed over, and a sequence in it


@dataclass(frozen=True)
class Portion(Generic[X]):
    """The batches that a rank makes of the shards that it is handed.

    fields: each with the number of its column; the fields of a column lie in the same shards.
    batches: for each batch, for each column, where each sequence is.
    payload: whatever else the controller sends along with them.
    pairs: for each batch, its ``pairs_S``; None where no sequence has a pair.
    """

    fields: tuple[tuple[str, int], ...]
    batches: tuple[tuple[tuple[Pick, ...], ...], ...]
    payload: X
    pairs: tuple[tuple[int | None, ...], ...] | None = None

    def join(self, shards: Sequence[Shard]) -> list[TrainBatch]:
        """The batches, in memory of their own, tokens as int64."""
        found = []
        for number, columns in enumerate(self.batches):
            parts = {
                name: [shards[shard].fields[name][place] for shard, place in columns[column]]
                for name, column in self.fields
            }
            tensors = {name: torch.from_numpy(np.concatenate(each)) for name, each in parts.items()}
            tensors["tokens_T"] = tensors["tokens_T"].long()
            pairs_S = None if self.pairs is None else self.pairs[number]
            found.append(TrainBatch(lengths_S=tuple(map(len, parts["tokens_T"])), pairs_S=pairs_S, **tensors))
        return found


@dataclass(frozen=True)
class WorkerInput(Generic[X]):
    """What a worker's method is given of a ``Portion``: its batches, and the controller's payload."""

    batches: list[TrainBatch]
    payload: X


@dataclass(frozen=True)
class WorkerOutput(Generic[R]):
    """What a worker's method returns.  value: goes to the controller.  shard: stays in Ray's store, if there is one."""

    value: R
    shard: Shard | None = None
