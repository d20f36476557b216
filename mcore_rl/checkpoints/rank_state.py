"""What one rank of a run keeps on disk, and how its file says which parts of the whole model's tensors it holds.

The file is a safetensors file.  A rank's optimizer holds ranges of its local tensors (Megatron's distributed optimizer
cuts them without regard to rows), each stored as it lies in memory: ``main/NAME``, ``exp_avg/NAME``,
``exp_avg_sq/NAME``, and ``weight/NAME`` of what is not trained.  The header says of each range which regions of which
Hugging Face tensors lie in it, by the family's table, so that any other layout can find what it needs in the files of
all ranks.  Beside them are counters, and the random state.

Trained weights are not stored a second time: in bfloat16 they are the main weights, cast; in float32 they are the main
weights.  Nor is the vocabulary's padding, which is zero.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mcore_rl.weights.table import Piece
from mcore_rl.weights.tensor_slice import slices_of_range

FORMAT = "mcore_rl rank state 2"
MAIN, WEIGHT = "main", "weight"
MOMENTS = ("exp_avg", "exp_avg_sq")
SIDECAR_FILES = "hf"  # where config.json and tokenizer are, beside the files of the ranks
RANDOM = "random"  # before the names of random states


@dataclass(frozen=True, slots=True)
class StateShard:
    """Elements ``begin`` to ``end`` (exclusive), row-major, of the local tensor ``name`` of ``shape``.

    pieces: what of Hugging Face tensors lies in them.  kinds: what is stored of them, each as one range of bytes.
    """

    name: str
    shape: tuple[int, ...]
    begin: int
    end: int
    pieces: tuple[Piece, ...]
    kinds: tuple[str, ...]

    @property
    def num_held(self) -> int:
        """Elements that are not padding."""
        return sum(piece.hf_region.num_elements for piece in self.pieces)


@dataclass(frozen=True, kw_only=True)
class RankState:
    """What a file says of itself, beside its tensors.

    dtype: torch's name of the live weights' own.  num_steps: of the optimizer that moved weights, as the schedule
    counts them.  adam_step: as Adam counts; None before its first.
    """

    role: str
    rank: int
    world_size: int
    layout: str
    critic: bool
    dtype: str
    num_steps: int
    num_skipped: int
    adam_step: int | None
    shards: tuple[StateShard, ...]

    def metadata(self) -> dict[str, str]:
        """For the header of the file."""
        values = asdict(self)
        values["shards"] = [
            (each.name, each.shape, each.begin, each.end, [_numbers(piece) for piece in each.pieces], each.kinds)
            for each in self.shards
        ]
        return {"format": FORMAT, "state": json.dumps(values, separators=(",", ":"))}

    @classmethod
    def parse(cls, metadata: Mapping[str, str]) -> RankState:
        """Back from ``metadata``.  ValueError: it is of another format."""
        if metadata.get("format") != FORMAT:
            raise ValueError(f"it is of format {metadata.get('format')!r}; this program reads {FORMAT!r}")
        values: dict[str, Any] = json.loads(metadata["state"])
        shards = tuple(
            StateShard(name, tuple(shape), begin, end, tuple(map(_piece, pieces)), tuple(kinds))
            for name, shape, begin, end, pieces, kinds in values.pop("shards")
        )
        return cls(shards=shards, **values)


def state_file(directory: Path, rank: int) -> Path:
    """Where the state of ``rank`` is in the directory of a role."""
    return directory / f"rank_{rank:05d}.safetensors"


def pieces_of_range(pieces: Sequence[Piece], shape: Sequence[int], begin: int, end: int) -> tuple[Piece, ...]:
    """What of ``pieces``, those of a local tensor of ``shape``, lies in its elements ``begin`` to ``end``."""
    found = []
    for region in slices_of_range(shape, begin, end):
        for piece in pieces:
            if (shared := region.shared(piece.local_region)) is not None:
                place = shared.moved(piece.local_start, piece.hf_start)
                found.append(Piece(piece.hf, place.start, shared.start, shared.shape))
    return tuple(found)


def _numbers(piece: Piece) -> tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    return piece.hf, piece.hf_start, piece.local_start, piece.shape


def _piece(numbers: Sequence[Any]) -> Piece:
    hf, *places = numbers
    return Piece(hf, *(tuple(place) for place in places))
