"""A file that appears under its name only when it is complete."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """``with replaced(path) as new:`` write ``new``; it replaces ``path`` at the end of the block.

    If the block raises, ``path`` is unchanged and ``new`` is gone.  Missing directories are created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.incomplete")
    try:
        yield new
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write ``path`` as ``replaced`` does."""
    with replaced(path) as new:
        new.write_text(text, encoding="utf-8")
