"""Shards, the parts of a batch in Ray's store, and how a rank makes its batches from them.

A shard holds some fields of some sequences.  Different fields may be in different shards, with different sequences: a
rank's results stay where it computed them.  A rank receives all shards that hold something of its sequences, and a
``Portion`` that says which of their sequences make up its batches.
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

from mcore_rl.ground.types import HIDDEN, Picture, TrainBatch

X = TypeVar("X")
R = TypeVar("R")


@dataclass(frozen=True)
class Shard:
    """Some fields of some sequences.  fields: by name of a field of ``TrainBatch``, one array per sequence."""

    fields: dict[str, list[NDArray[Any]]]

    @classmethod
    def of(cls, lengths_S: Sequence[int], **tensors_T: Tensor | None) -> Shard:
        """A shard of sequences that are packed end to end, without a copy.  A field that is None is left out."""
        ends = np.cumsum(lengths_S)[:-1]
        there = {name: tensor.numpy() for name, tensor in tensors_T.items() if tensor is not None}
        return cls({name: np.split(array, ends) for name, array in there.items()})

    @classmethod
    def of_hidden(cls, batch: TrainBatch, hidden_MH: Tensor) -> Shard:
        """What a teacher said of ``batch``: a row for each trained token, and which tokens those are.

        numpy has no bfloat16: its bits are there as int16.
        """
        bits_MH = hidden_MH.view(torch.int16) if hidden_MH.dtype is torch.bfloat16 else hidden_MH
        scored = cls.of(batch.lengths_S, teacher_scored_T=batch.mask_T)
        counts = [int(part.sum()) for part in scored.fields["teacher_scored_T"]]
        return cls(scored.fields | cls.of(counts, teacher_hidden_MH=bits_MH).fields)

    @classmethod
    def joined(cls, shards: Sequence[Shard]) -> Shard:
        """The sequences of all ``shards``, one shard after the other; all have the same fields."""
        return cls({name: [part for shard in shards for part in shard.fields[name]] for name in shards[0].fields})

    def behind(self, lengths_S: Sequence[int]) -> Shard:
        """The last tokens of each sequence, as those of sequences of ``lengths_S`` tokens; earlier ones are 0."""
        return Shard(
            {
                name: [_behind(part, length) for part, length in zip(parts, lengths_S, strict=True)]
                for name, parts in self.fields.items()
            }
        )

    def __reduce__(self) -> tuple[Callable[..., Shard], tuple[object, ...]]:
        """Pickles plain buffers, which Ray's pickler stores directly; for each array it would call back into Python.

        So the views are copied only once, into Ray's store.
        """
        rows = {name: (parts[0].dtype.str, parts[0].shape[1:]) for name, parts in self.fields.items()}
        buffers = [[PickleBuffer(part.data) for part in parts] for parts in self.fields.values()]
        return _shard, (rows, buffers)


def _behind(part: NDArray[Any], length: int) -> NDArray[Any]:
    moved = np.zeros((length, *part.shape[1:]), part.dtype)
    count = min(length, len(part))
    moved[length - count :] = part[len(part) - count :]
    return moved


def _shard(rows: dict[str, tuple[str, tuple[int, ...]]], buffers: list[list[memoryview]]) -> Shard:
    """Unpickles a shard.  rows: for each field, the dtype of an element and the shape of a token's row."""
    return Shard(
        {
            name: [np.frombuffer(part, dtype).reshape(-1, *shape) for part in parts]
            for (name, (dtype, shape)), parts in zip(rows.items(), buffers, strict=True)
        }
    )


def shards_of(batch: TrainBatch, members: Sequence[Sequence[int]]) -> list[Shard]:
    """A shard for each list of sequences in ``members``, in its order, without a copy.  batch: on the CPU."""
    starts = batch.offsets_S
    arrays = [(name, tensor.numpy()) for name, tensor in batch.token_fields()]
    shards = []
    for indices in members:
        parts = [slice(starts[i], starts[i] + batch.lengths_S[i]) for i in indices]
        shards.append(Shard({name: [array[part] for part in parts] for name, array in arrays}))
    return shards


Pick = tuple[int, int]  # (number of a shard among those that a rank receives, number of a sequence in it)


@dataclass(frozen=True)
class Portion(Generic[X]):
    """Describes the batches that a rank makes from the shards that it receives.

    fields: each field with the number of its column; the fields of a column are in the same shards.
    batches: for each batch, for each column, the place of each sequence.
    payload: whatever else the controller sends along with them.
    pairs: for each batch, its ``pairs_S``; None if no sequence has a pair.
    extra: for each batch, its ``extra_S``.
    images: for each batch, its ``images_S``; None if models are given no pictures.
    patches: the pictures whose patches follow the shards, where the rank has a vision tower.
    num_shards: that come before these; None: all are shards.
    """

    fields: tuple[tuple[str, int], ...]
    batches: tuple[tuple[tuple[Pick, ...], ...], ...]
    payload: X
    pairs: tuple[tuple[int | None, ...], ...] | None = None
    extra: tuple[dict[str, NDArray[np.float32]], ...] = ()
    images: tuple[tuple[tuple[Picture, ...], ...], ...] | None = None
    patches: tuple[str, ...] = ()
    num_shards: int | None = None

    def join(self, given: Sequence[Any]) -> list[TrainBatch]:
        """The batches, copied out of the shards, tokens as int64, and hidden states in their dtype.

        given: the shards, and behind them the patches of pictures, which are not copied.
        """
        shards: Sequence[Shard] = given[: self.num_shards]
        following = given[len(shards) :]
        patches = dict(zip(self.patches, following, strict=True)) if following else {}
        joined = []
        for number, columns in enumerate(self.batches):
            parts = {
                name: [shards[shard].fields[name][place] for shard, place in columns[column]]
                for name, column in self.fields
            }
            tensors = {name: torch.from_numpy(np.concatenate(each)) for name, each in parts.items()}
            tensors["tokens_T"] = tensors["tokens_T"].long()
            if (hidden := tensors.get(HIDDEN)) is not None and hidden.dtype is torch.int16:
                tensors[HIDDEN] = hidden.view(torch.bfloat16)
            pairs_S = None if self.pairs is None else self.pairs[number]
            extra_S = {name: torch.from_numpy(x_S) for name, x_S in self.extra[number].items()} if self.extra else {}
            images_S = None if self.images is None else self.images[number]
            lengths_S = tuple(map(len, parts["tokens_T"]))
            joined.append(TrainBatch.of_fields(lengths_S, tensors, pairs_S, extra_S, images_S, patches))
        return joined


@dataclass(frozen=True)
class WorkerInput(Generic[X]):
    """The argument of a worker's method: the batches of a ``Portion``, and the controller's payload."""

    batches: list[TrainBatch]
    payload: X


@dataclass(frozen=True)
class WorkerOutput(Generic[R]):
    """The result of a worker's method.  value: goes to the controller.  shard: stays in Ray's store; None is none."""

    value: R
    shard: Shard | None = None
