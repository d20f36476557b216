"""The pixels of a step: each picture is read and made patches of once, however many sequences have it.

Files are decoded in threads, straight into Ray's store; the controller holds one picture for each thread at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from mcore_rl.data.media.pixels import patches_of_file
from mcore_rl.data.media.placed import Placed
from mcore_rl.data.media.prompts import PictureReader
from mcore_rl.errors import DataError
from mcore_rl.parallel.device import num_cores
from mcore_rl.runtime.shared_batch import PatchesRef
from mcore_rl.runtime.train_group import TrainGroup


class PicturedRows(Protocol):
    """Rows by number, whose pictures can be read again."""

    title: str

    @property
    def pictures(self) -> PictureReader | None:
        """What reads them; None: the rows have none."""
        ...

    def image_files(self, index: int) -> list[bytes]:
        """The files of a row's pictures, in order."""
        ...


@dataclass(frozen=True)
class _File:
    """A picture's file.  placed: in one of the rows that have it."""

    placed: Placed
    content: bytes


def put_pixels(
    group: TrainGroup, rows: PicturedRows, media: Mapping[int, Sequence[Placed]]
) -> dict[str, PatchesRef]:
    """Puts the patches of the rows' pictures into Ray's store; returns a reference to each, by the picture's key.

    media: the pictures of each row, by its number.  DataError, with the row: a file has changed or cannot be decoded.
    """
    if rows.pictures is None:
        return {}
    files = dict[str, _File]()
    for number, placed in media.items():
        if placed:
            for each, content in zip(placed, rows.image_files(number), strict=True):
                files.setdefault(each.image.sha256, _File(each, content))
    with ThreadPoolExecutor(num_cores(), thread_name_prefix="pixels") as pool:
        refs = pool.map(partial(_put, group, rows.title, rows.pictures), files.values())
        return dict(zip(files, refs, strict=True))


def _put(group: TrainGroup, title: str, reader: PictureReader, file: _File) -> PatchesRef:
    image, wanted = file.placed.image, file.placed.grid
    try:
        patches, grid = patches_of_file(file.content, reader.sizing)
    except ValueError as error:  # behind a header that was right
        raise DataError(title, [f"{image.source}: {error}"]) from error
    assert grid == wanted, f"{image.source} has {grid}, and {wanted} by its header"
    return group.put_patches(patches)
