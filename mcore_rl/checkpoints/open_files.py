"""The files of an opened checkpoint: each is opened when it is first read, and all are closed together."""

from __future__ import annotations

from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Self

from mcore_rl.errors import CheckpointError


class OpenFiles:
    """The open files of ``directory``.  Leaving a ``with`` closes them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[Path, FileIO] = {}

    def descriptor(self, path: Path) -> int:
        """The file descriptor of ``path``, opened on first use.  CheckpointError: it cannot be opened."""
        if path not in self._files:
            try:
                self._files[path] = FileIO(path)
            except OSError as error:
                problem = (
                    f"{path.name}: cannot be opened: {error.strerror}. It was there when the checkpoint was opened"
                )
                raise CheckpointError(str(self.directory), [problem]) from error
        return self._files[path].fileno()

    def close(self) -> None:
        """Close the files; reading opens them again."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
