"""Thumbnails of pictures, which the report shows: each in a file of the run directory, named by the picture's sha256.

A run may see more pictures than anybody looks at: of each step a few are written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

from PIL import Image

from mcore_rl.data.media.images import decoded
from mcore_rl.data.prompts import PromptSet
from mcore_rl.episodes import Episode
from mcore_rl.errors import DataError
from mcore_rl.tracking.atomic import replaced
from mcore_rl.tracking.samples import SIDE, thumbnail_file

OF_A_STEP = 16  # pictures: a quarter of what a report shows
OF_A_VALIDATION = 64  # as many as a report shows; its prompts are the same at every step


class Thumbnails:
    """Writes thumbnails in a thread of its own.  warn: is told of a disk that is full, or fails."""

    def __init__(self, run_dir: Path, *, warn: Callable[[str], None]) -> None:
        self._run_dir, self._warn = run_dir, warn
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="thumbnails")

    def begin(self, prompts: PromptSet, episodes: Sequence[Episode], most: int) -> None:
        """Begins to write those of ``write_thumbnails``."""
        self._thread.submit(self._write, prompts, episodes, most)

    def close(self) -> None:
        """Waits until all that was begun is written."""
        self._thread.shutdown()

    def _write(self, prompts: PromptSet, episodes: Sequence[Episode], most: int) -> None:
        try:
            write_thumbnails(self._run_dir, prompts, episodes, most)
        except OSError as error:
            self._warn(f"thumbnails of pictures: {error}. The report names them in their place")


def write_thumbnails(run_dir: Path, prompts: PromptSet, episodes: Sequence[Episode], most: int) -> None:
    """Writes those of up to ``most`` pictures of the episodes' rows, which are rows of ``prompts``.

    First come the rows with the highest and the lowest scores.  A picture that can no longer be read has none.
    OSError: the disk is full, or fails.
    """
    ordered = sorted(episodes, key=lambda each: -each.graded.value)
    wanted = dict[str, tuple[int, int]]()
    for each in chain.from_iterable(zip(ordered, reversed(ordered), strict=True)):
        for place, placed in enumerate(each.row.media):
            wanted.setdefault(placed.image.sha256, (each.row.number, place))
    for sha256, (number, place) in list(wanted.items())[:most]:
        path = thumbnail_file(run_dir, sha256)
        if path.exists():
            continue
        try:
            content = prompts.image_files(number)[place]
        except DataError:
            continue
        _write(content, path)


def _write(content: bytes, path: Path) -> None:
    try:
        picture = decoded(content)
    except ValueError:
        return
    picture.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    path.parent.mkdir(exist_ok=True)
    with replaced(path) as new:
        picture.save(new, format="WEBP", quality=80)
