"""Finished pieces of a long work, beside the file that they are for, so that the work goes on after a kill.

A journal is ``.NAME.partial``: a line that says what work it is of, then one JSON object a line.  A line that a kill
cut short is dropped.  Invariant: the pieces that are read are those that were appended for the same work.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from mcore_rl.ground.errors import ConfigError, Violation


class Journal:
    """Made by ``journal``.  entries: those of earlier attempts."""

    def __init__(self, file: IO[str] | None = None, entries: tuple[Any, ...] = ()) -> None:
        self._file = file
        self.entries = entries

    def append(self, entry: Mapping[str, Any]) -> None:
        """Note one finished piece; after the return, the death of this process no longer loses it."""
        if self._file is not None:
            self._file.write(json.dumps(entry) + "\n")
            self._file.flush()


@contextmanager
def journal(out: Path, work: Mapping[str, Any], *, afresh: bool) -> Iterator[Journal]:
    """The journal of ``out``; it is gone when the block ends, and stays when it raises.

    work: what the pieces follow from; pieces of other work are not taken.
    afresh: discard the pieces of other work, instead of refusing to.

    Raises ConfigError if ``out`` cannot be written, or is being written by another process, or its journal is of other
    work.
    """
    path = journal_of(out)
    head = hashlib.sha256(json.dumps(work, sort_keys=True, default=str).encode()).hexdigest()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe of that name must not block
        file = os.fdopen(os.open(path, flags, 0o644), "r+", encoding="utf-8")
    except OSError as error:
        raise _refusal(out, f"cannot be written: {error.strerror}", "Write another path") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise _refusal(out, "another process is writing it", "Wait for it, or write another path") from error
        whole = [line for line in file.readlines() if line.endswith("\n")]
        if whole and whole[0] != f"{head}\n":
            if not afresh:
                remedy = "Write the command as it was, or overwrite=true, or another path"
                raise _refusal(out, f"was begun by another command: {path} has its first results", remedy)
            whole = []
        whole = whole or [f"{head}\n"]
        file.seek(0)
        file.truncate()
        file.writelines(whole)
        file.flush()
        yield Journal(file, tuple(json.loads(line) for line in whole[1:]))
        path.unlink()


def journal_of(out: Path) -> Path:
    """The journal's file: ``answers.parquet`` has ``.answers.parquet.partial``."""
    return out.with_name(f".{out.name}.partial")


def sum_of(path: str | Path) -> str:
    """The SHA-256 of a file's bytes."""
    with open(Path(path).expanduser(), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _refusal(out: Path, problem: str, remedy: str) -> ConfigError:
    return ConfigError([Violation("out", out, problem, remedy)])
