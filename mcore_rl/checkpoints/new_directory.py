"""A directory that appears under its name only when it is complete.

Everything is written in ``NAME.incomplete`` beside the final ``NAME``, which appears by one rename when all is on the
disk.  After an interruption the files stay under the temporary name: they show what is missing, the name says not to
use them, and deleting a user's files is the user's decision.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mcore_rl.ground.errors import CheckpointError

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class NewDirectory:
    """``path``: the final name.  ``incomplete``: the temporary directory.

    joins: another process creates the directory, and this one only writes into it.
    Raises CheckpointError with every violation: ``path`` exists and is not an empty directory, an ``.incomplete`` one
    is left from before, fewer than ``needed_bytes`` are free.
    """

    def __init__(self, path: Path | str, needed_bytes: int, *, joins: bool = False) -> None:
        self.path = Path(path).resolve()
        self.incomplete = self.path.with_name(self.path.name + ".incomplete")
        if joins:
            return
        problems = list(self._place_problems())
        parent = next(place for place in self.path.parents if place.exists())
        free = shutil.disk_usage(parent).free
        if free < needed_bytes:
            size = f"{needed_bytes / 2**30:.1f} GiB are needed and {free / 2**30:.1f} GiB are free on its disk"
            problems.append(f"{size}. Free some, or give a directory on another disk")
        if problems:
            raise CheckpointError(str(self.path), problems)
        with self.disk_errors(self.incomplete):
            self.incomplete.mkdir(parents=True)

    def complete(self) -> None:
        """Wait until everything is on the disk, and give the directory its name."""
        with self.disk_errors(self.incomplete):
            for path in (*self.incomplete.rglob("*"), self.incomplete):
                wait_for_disk(path)
            self.incomplete.rename(self.path)  # replaces an empty directory, and nothing else
            wait_for_disk(self.path.parent)

    @contextmanager
    def disk_errors(self, path: Path) -> Iterator[None]:
        """An OSError inside becomes a CheckpointError that names ``path``."""
        try:
            yield
        except OSError as error:
            remedy = "Free some space" if error.errno in NO_SPACE else "Mend that"
            kept = f" (what was written is in {self.incomplete}: remove it first)" if self.incomplete.exists() else ""
            problem = f"{path.name}: cannot be written: {error.strerror}. {remedy} and try again{kept}"
            raise CheckpointError(str(self.path), [problem]) from error

    def _place_problems(self) -> Iterator[str]:
        if self.path.exists() and not (self.path.is_dir() and not any(self.path.iterdir())):
            kind = "holds files" if self.path.is_dir() else "is a file"
            yield f"{self.path.name}: exists and {kind}. Give a new directory, or move this one away"
        if self.incomplete.exists():
            left = "is there: an earlier attempt was interrupted, or another is writing now"
            yield f"{self.incomplete.name}: {left}. If none is, remove it: rm -r '{self.incomplete}'"


def wait_for_disk(path: Path) -> None:
    """Return when the file or directory ``path`` is on the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
