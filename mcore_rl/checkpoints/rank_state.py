"""The file of one rank in a run's checkpoint, and the description of the model parts in it.

The file is a safetensors file.  A rank's optimizer holds ranges of its local tensors (Megatron's distributed optimizer
cuts them without regard to rows), and the file holds each range as it is in memory: ``main/NAME``, ``exp_avg/NAME``,
``exp_avg_sq/NAME``, ``snapshot.ROLE/NAME`` of frozen weights that move, and ``weight/NAME`` for a tensor that is not
trained.  The header lists the regions of Hugging Face tensors in each range, by the family's table, so that any other
layout finds what it needs in the files of all ranks.  The file also holds counters and the random state.

Trained weights are not stored a second time: in bfloat16 they are the main weights, cast; in float32 they are the main
weights.  The vocabulary's padding, which is zero, is not stored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mcore_rl.config.role import Head
from mcore_rl.weights.table import Piece
from mcore_rl.weights.tensor_slice import slices_of_range

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
