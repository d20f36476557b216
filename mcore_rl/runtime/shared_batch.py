"""A step's batch in Ray's store: the controller knows where each sequence is, but never reads its tokens.

Tokens are put there once.  Workers leave what they compute from them (log-probs, values, advantages) in the store of
their node.  Other workers read it from there, in whatever layout; it never passes through the controller.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from ray import ObjectRef
from torch import Tensor

from mcore_rl.data.shared_prompts import Stem
from mcore_rl.ground.types import Picture
from mcore_rl.runtime.shard import Pick, Portion, Shard

FEATURES = "feature_T"  # who is given it is given pictures
T = TypeVar("T")
X = TypeVar("X")
ShardRef = ObjectRef[Shard]
PatchesRef = ObjectRef[NDArray[np.uint8]]


@dataclass(frozen=True)
class ShardRefs(Generic[X]):
    """What is sent to one data-parallel rank, from which it makes its batches.

    portion: a pickled ``Portion`` with a payload of type ``X``.  shards: references to the shards that it refers to.
    patches: references to the patches of its pictures, for the ranks of the first pipeline stage.
    """

    portion: bytes
    shards: list[ShardRef]
    patches: list[PatchesRef] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class _Column:
    """Where fields are.  shards: a reference to each.  where_S: for each sequence, its shard and its number there."""

    shards: list[ShardRef]
    where_S: list[Pick]


class SharedBatch:
    """The fields of a step's batch, as references; empty at first.

    lengths_S: tokens of each sequence.  assignment: ``assignment[r]`` lists the sequences that data-parallel rank r
    trains.  pairs_S, extra_S, images_S: see ``TrainBatch``.  patches: a reference to those of each picture, by its key.
    costs_S: of each sequence, by which work is balanced over ranks; None: its tokens.
    stems: of all sequences, where prompts are shared; empty elsewhere.
    """

    def __init__(
        self,
        lengths_S: Sequence[int],
        assignment: Sequence[Sequence[int]],
        pairs_S: tuple[int | None, ...] | None = None,
        extra_S: Mapping[str, Tensor] | None = None,
        images_S: tuple[tuple[Picture, ...], ...] | None = None,
        patches: Mapping[str, PatchesRef] | None = None,
        costs_S: Sequence[float] | None = None,
        stems: Sequence[Stem] = (),
    ) -> None:
        self.stems = tuple(stems)
        self.lengths_S = tuple(lengths_S)
        self.assignment = [list(each) for each in assignment]
        self.pairs_S = pairs_S
        self.images_S = images_S
        self.patches = dict(patches or {})
        self.costs_S: Sequence[float] = self.lengths_S if costs_S is None else costs_S
        self.extra_S = {name: x_S.numpy() for name, x_S in (extra_S or {}).items()}
        self._columns: dict[str, _Column] = {}  # by field

    def add(self, members: Sequence[Sequence[int]], shards: Sequence[ShardRef], fields: Sequence[str]) -> None:
        """Adds ``fields`` of all sequences, or replaces them.

        members: the sequences in each shard.  shards: a reference to each.
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
        """What to send to each data-parallel rank.

        batches: for each rank, the sequences of each of its batches.  fields: those that the batches shall have;
        missing ones are left out.  payloads: one for each rank.
        """
        names = [name for name in fields if name in self._columns]
        columns = list(dict.fromkeys(self._columns[name] for name in names))
        of_field = tuple((name, columns.index(self._columns[name])) for name in names)
        refs = list[ShardRefs[X]]()
        for payload, of_rank in zip(payloads, batches, strict=True):
            handed: dict[tuple[int, int], int] = {}  # (column, shard) -> its number among the shards of this rank
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
            extra = tuple({name: x_S[list(batch)] for name, x_S in self.extra_S.items()} for batch in of_rank)
            images, keys_of_pictures = self._pictures(of_rank) if FEATURES in names else (None, [])
            portion = Portion(
                fields=of_field,
                batches=picks,
                payload=payload,
                pairs=pairs,
                extra=extra if self.extra_S else (),
                images=images,
                patches=tuple(keys_of_pictures),
                num_shards=len(handed),
            )
            pickled = pickle.dumps(portion, protocol=pickle.HIGHEST_PROTOCOL)
            shards = [columns[number].shards[shard] for number, shard in handed]
            refs.append(ShardRefs(pickled, shards, [self.patches[key] for key in keys_of_pictures]))
        return refs

    def _pictures(
        self, batches: Sequence[Sequence[int]]
    ) -> tuple[tuple[tuple[tuple[Picture, ...], ...], ...], list[str]]:
        """(the pictures of each of ``batches``' sequences; the key of each picture, once)."""
        images_S = self.images_S
        assert images_S is not None, "features of no pictures"
        images = tuple(tuple(images_S[sequence] for sequence in batch) for batch in batches)
        shown = (image.key for batch in images for of_sequence in batch for image in of_sequence)
        return images, list(dict.fromkeys(shown))

    def in_order(self, members: Sequence[Sequence[int]], parts: Sequence[T]) -> T:
        """Joins records of tensors [S] into one record, of the sequences that they are of, in the order of the batch.

        members: the sequences of each record.  parts: dataclasses of tensors, None, or such dataclasses.
        """
        assert len(members) == len(parts), f"{len(parts)} records of {len(members)} lists of sequences"
        order = torch.tensor([index for indices in members for index in indices]).argsort()
        joined: T = _in_order(parts, order)
        return joined

    def __contains__(self, field: str) -> bool:
        return field in self._columns


def _in_order(parts: Sequence[Any], order: Tensor) -> Any:
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(list(parts))[order]
    if first is None:
        return None
    names = [each.name for each in fields(first)]
    return type(first)(**{name: _in_order([getattr(part, name) for part in parts], order) for name in names})
