"""The files of ranks in a run's checkpoint: the model parts in each, and reading the whole model's tensors from all.

A rank's file is a safetensors file.  Its optimizer holds ranges of its local tensors (Megatron's distributed optimizer
cuts them without regard to rows), and the file holds each range as it is in memory: ``main/NAME``, ``exp_avg/NAME``,
``exp_avg_sq/NAME``, ``snapshot.ROLE/NAME`` of frozen weights that move, and ``weight/NAME`` for a tensor that is not
trained.  The header lists the regions of Hugging Face tensors in each range, by the family's table, so that any other
layout finds what it needs in the files of all ranks.  The file also holds counters and the random state.

Trained weights are not stored a second time: in bfloat16 they are the main weights, cast; in float32 they are the main
weights.  The vocabulary's padding, which is zero, is not stored.

``StoredState`` reads without communication: every reader opens all files, reads their headers, and then the ranges that
it needs.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from mcore_rl.checkpoints.safetensors import OpenFiles, TensorInfo, read_header, read_metadata, read_slice
from mcore_rl.config.role import Head
from mcore_rl.ground.errors import CheckpointError
from mcore_rl.weights.table import Piece
from mcore_rl.weights.tensor_slice import TensorSlice, slices_of_range, without
from mcore_rl.weights.views import view_of

FORMAT = "mcore_rl rank state 3"
BEFORE = "mcore_rl rank state 2"  # said critic: bool instead of a head
MAIN = "main"
WEIGHT = "weight"
MOMENTS = ("exp_avg", "exp_avg_sq")
SNAPSHOT = "snapshot."  # and its name: frozen weights that move, or their average in float32
SIDECAR_FILES = "hf"  # where config.json and tokenizer are, beside the files of the ranks
RANDOM = "random"  # before the names of random states


@dataclass(frozen=True, slots=True)
class StateShard:
    """Elements ``begin`` to ``end`` (exclusive), row-major, of the local tensor ``name`` of ``shape``.

    pieces: the parts of Hugging Face tensors in this range.  kinds: what is stored of the range (main, exp_avg, ...),
    each as one range of bytes.
    """

    name: str
    shape: tuple[int, ...]
    begin: int
    end: int
    pieces: tuple[Piece, ...]
    kinds: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RankState:
    """The header of a rank's file.

    dtype: torch's name of the live weights' dtype.  num_steps: optimizer steps that moved weights, as the schedule
    counts them.  num_skipped: steps skipped for a non-finite loss or gradient.  adam_step: Adam's own count; None
    before its first step.
    """

    role: str
    rank: int
    world_size: int
    layout: str
    head: Head
    dtype: str
    num_steps: int
    num_skipped: int
    adam_step: int | None
    shards: tuple[StateShard, ...]

    def metadata(self) -> dict[str, str]:
        """The state as strings, for a safetensors header."""
        values = asdict(self) | {"head": self.head.value}
        values["shards"] = [
            (each.name, each.shape, each.begin, each.end, [_numbers(piece) for piece in each.pieces], each.kinds)
            for each in self.shards
        ]
        return {"format": FORMAT, "state": json.dumps(values, separators=(",", ":"))}

    @classmethod
    def parse(cls, metadata: Mapping[str, str]) -> RankState:
        """The inverse of ``metadata``.  ValueError: it has another format."""
        if metadata.get("format") not in (FORMAT, BEFORE):
            raise ValueError(f"it is of format {metadata.get('format')!r}; this program reads {FORMAT!r}")
        values: dict[str, Any] = json.loads(metadata["state"])
        if metadata["format"] == BEFORE:
            values["head"] = Head.value.value if values.pop("critic") else Head.lm.value
        values["head"] = Head(values["head"])
        shards = tuple(
            StateShard(name, tuple(shape), begin, end, tuple(map(_piece, pieces)), tuple(kinds))
            for name, shape, begin, end, pieces, kinds in values.pop("shards")
        )
        return cls(shards=shards, **values)


def state_file(directory: Path, rank: int) -> Path:
    """The file of ``rank`` in the directory of a role."""
    return directory / f"rank_{rank:05d}.safetensors"


def pieces_of_range(pieces: Sequence[Piece], shape: Sequence[int], begin: int, end: int) -> tuple[Piece, ...]:
    """The parts of ``pieces`` within elements ``begin`` to ``end`` of their local tensor, which has ``shape``."""
    stored = []
    for region in slices_of_range(shape, begin, end):
        for piece in pieces:
            if (shared := region.shared(piece.local_region)) is not None:
                place = shared.moved(piece.local_start, piece.hf_start)
                stored.append(Piece(piece.hf, place.start, shared.start, shared.shape))
    return tuple(stored)


def _numbers(piece: Piece) -> tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    return piece.hf, piece.hf_start, piece.local_start, piece.shape


def _piece(numbers: Sequence[Any]) -> Piece:
    hf, *places = numbers
    return Piece(hf, *(tuple(place) for place in places))


AGAIN = "Resume from another step"


@dataclass(frozen=True, slots=True)
class _Source:
    """A piece and its local tensor.  info: describes the tensor as if all of it were in the file."""

    info: TensorInfo
    piece: Piece


class StoredState(OpenFiles):
    """The files of one role, and reading regions of the tensors that their ranks hold.

    Where several ranks hold a copy (tensor ranks of a norm, the last stage of a tied embedding), that of the preferred
    rank is read if there is one, else the lowest rank's.  ranks: their headers, in order.  tensors: of each file, by
    name.
    """

    def __init__(self, directory: Path, ranks: Sequence[RankState], tensors: Sequence[dict[str, TensorInfo]]) -> None:
        super().__init__(directory)
        self.ranks = tuple(ranks)
        self.tensors = tuple(tensors)
        self._sources: dict[tuple[str, str], list[_Source]] = defaultdict(list)
        for state, held in zip(ranks, tensors, strict=True):
            for shard in state.shards:
                for kind in shard.kinds:
                    info = held[f"{kind}/{shard.name}"]
                    # The bytes before its begin are another tensor's; no piece of this shard reaches there.
                    begin = info.begin - shard.begin * info.dtype.itemsize
                    whole = TensorInfo(info.name, info.dtype, shard.shape, info.file, begin, info.end)
                    for piece in shard.pieces:
                        self._sources[kind, piece.hf].append(_Source(whole, piece))

    @classmethod
    def open(cls, directory: Path, prefer: int | None = None) -> StoredState:
        """The files in ``directory``.  prefer: the rank whose copies are read first.

        Raises CheckpointError with every violation: a file that is missing, damaged, or of another world or format.
        """
        first = state_file(directory, 0)
        problems = list[str]()
        paths = sorted(directory.glob(state_file(directory, 0).name.replace("00000", "*")))
        if not paths:
            raise CheckpointError(str(directory), [f"{first.name} is missing, and so are all others. {AGAIN}"])
        ranks = list[RankState]()
        tensors = list[dict[str, TensorInfo]]()
        for path in paths:
            held, file_problems = read_header(path)
            problems += file_problems
            if file_problems:
                continue
            try:
                ranks.append(RankState.parse(read_metadata(path)))
                tensors.append(held)
            except (ValueError, KeyError, TypeError) as error:
                problems.append(f"{path.name} cannot be read: {error}. {AGAIN}")
        if ranks:
            expected = {state_file(directory, rank).name for rank in range(ranks[0].world_size)}
            names = {path.name for path in paths}
            problems += [f"{name} is missing. {AGAIN}" for name in sorted(expected - names)]
            problems += [f"{name} is of no rank of {ranks[0].world_size}. {AGAIN}" for name in sorted(names - expected)]
        if problems:
            raise CheckpointError(str(directory), problems)
        order = sorted(range(len(ranks)), key=lambda index: (ranks[index].rank != prefer, ranks[index].rank))
        return cls(directory, [ranks[index] for index in order], [tensors[index] for index in order])

    @property
    def adam_step(self) -> int | None:
        """Adam's own count; a rank that holds no trained tensor (a stage without adapters) has counted none."""
        return max(state.adam_step or 0 for state in self.ranks) or None

    def mismatches(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
        """Every stored tensor that a model whose Hugging Face tensors have ``shapes`` does not have, or not so."""
        stored: dict[str, tuple[int, ...]] = {}
        for (_, hf), sources in self._sources.items():
            ends = [source.piece.hf_region.end for source in sources]
            stored[hf] = tuple(map(max, zip(*ends, stored.get(hf, ends[0]), strict=True)))
        for hf, shape in stored.items():
            if shapes.get(hf) != shape:
                expected = f"shape {shapes[hf]}" if hf in shapes else "no such tensor"
                yield f"tensor {hf} has shape {shape}, and the model {expected}. Give a checkpoint of this model"

    def holds(self, kind: str, hf: str) -> bool:
        """Whether any part of Hugging Face tensor ``hf`` is stored under ``kind``."""
        return (kind, hf) in self._sources

    def missing(self, kind: str, hf: str, region: TensorSlice) -> str | None:
        """A message about the first part of ``region`` that no file holds; None if all of it is stored."""
        left = [region]
        for _, part in self._parts(kind, hf, region):
            left = [rest for each in left for rest in without(each, part)]
        if not left:
            return None
        return f"tensor {hf}: {kind} of {left[0].shape} from {left[0].start} is in no file. {AGAIN}"

    def read_into(self, kind: str, hf: str, region: TensorSlice, out: Tensor) -> None:
        """Copy ``region`` of tensor ``hf`` to ``out``, of its shape, any strides, device and dtype (cast).

        CheckpointError: a file changed since it was opened, or cannot be read.
        """
        left = [region]
        for source, part in self._parts(kind, hf, region):
            rest = list[TensorSlice]()
            for each in left:
                if (wanted := each.shared(part)) is not None:
                    place = wanted.moved(source.piece.hf_start, source.piece.local_start)
                    read_slice(
                        self.descriptor(source.info.file), source.info, place, view_of(out, wanted.within(region))
                    )
                rest += without(each, part)
            left = rest
            if not left:
                return
        assert not left, f"{kind} of {hf}: nobody asked whether it is there"

    def _parts(self, kind: str, hf: str, region: TensorSlice) -> Iterator[tuple[_Source, TensorSlice]]:
        for source in self._sources.get((kind, hf), ()):
            if (shared := region.shared(source.piece.hf_region)) is not None:
                yield source, shared
