"""What one data-parallel rank is sent of a batch: its sequences, each where it lies in the batch.

The controller copies nothing: pickled out of band, the views are written once, into Ray's store.  The rank joins them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pickle import PickleBuffer
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mcore_rl.types import TrainBatch


@dataclass(frozen=True)
class Shard:
    """lengths_S: of its sequences.  fields: of each field of ``TrainBatch`` that is there, every sequence's part."""

    lengths_S: tuple[int, ...]
    fields: dict[str, list[NDArray[Any]]]

    def batch(self) -> TrainBatch:
        """In memory of its own, tokens as int64."""
        tensors = {name: torch.from_numpy(np.concatenate(parts)) for name, parts in self.fields.items()}
        tensors["tokens_T"] = tensors["tokens_T"].long()
        return TrainBatch(lengths_S=self.lengths_S, **tensors)

    def __reduce__(self) -> tuple[Callable[..., Shard], tuple[object, ...]]:
        """As plain buffers, which Ray's pickler takes as they are: for an array it calls back into Python."""
        rows = {name: (parts[0].dtype.str, parts[0].shape[1:]) for name, parts in self.fields.items()}
        buffers = [[PickleBuffer(part.data) for part in parts] for parts in self.fields.values()]
        return _shard, (self.lengths_S, rows, buffers)


def _shard(
    lengths_S: tuple[int, ...], rows: dict[str, tuple[str, tuple[int, ...]]], buffers: list[list[memoryview]]
) -> Shard:
    """rows: type of an element and shape of a token's row, of each field."""
    fields = {
        name: [np.frombuffer(part, dtype).reshape(-1, *shape) for part in parts]
        for (name, (dtype, shape)), parts in zip(rows.items(), buffers, strict=True)
    }
    return Shard(lengths_S, fields)


def shards_of(batch: TrainBatch, members: Sequence[Sequence[int]]) -> list[Shard]:
    """The sequences of ``batch``, which is on the CPU, that each of ``members`` lists, in that order."""
    starts = batch.offsets_S
    arrays = [(name, tensor.numpy()) for name, tensor in batch.token_fields()]
    found = []
    for indices in members:
        lengths_S = tuple(batch.lengths_S[i] for i in indices)
        parts = [slice(starts[i], starts[i] + batch.lengths_S[i]) for i in indices]
        found.append(Shard(lengths_S, {name: [array[part] for part in parts] for name, array in arrays}))
    return found
