"""Whether a path can be read or written, without opening it: what is no regular file may block whoever opens it.

Where something is to be made in a folder, a nameless file is made there first, or an empty folder that is removed at
once: permissions say nothing of /proc, of a full quota or of a file system that was mounted for reading.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

PathProblem = tuple[str, str]  # what is wrong, what to write instead
KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFREG: "a file",
}


def input_problem(path: str | Path, kind: str = "file") -> PathProblem | None:
    """Why ``path`` cannot be read as a ``file``, or as a ``directory`` of files; None if it can."""
    remedy = f"Write the path of a {kind} that you can read"
    try:
        place = Path(path).expanduser()
        there = place.stat()
        if problem := _kind_problem(there.st_mode, kind):
            return problem, remedy
        if not os.access(place, os.R_OK | (os.X_OK if kind == "directory" else 0)):
            return "may not be read by you", remedy
        if kind == "directory":
            for entry in os.scandir(place):
                mode = entry.stat().st_mode if entry.is_symlink() and os.path.exists(entry) else 0
                mode = mode or entry.stat(follow_symlinks=False).st_mode
                if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
                    return f"holds {entry.name}, which is {KINDS[stat.S_IFMT(mode)]}", "Remove it from there"
    except FileNotFoundError:
        return f"there is no such {kind}", remedy
    except OSError as error:
        return f"cannot be read: {error.strerror}", remedy
    except (RuntimeError, ValueError) as error:
        return f"cannot be read: {error}", remedy
    return None


def output_problem(path: str | Path, kind: str = "file") -> PathProblem | None:
    """Why ``path`` cannot be written as a ``file`` or ``directory``; None if it seems that it can."""
    try:
        place = Path(path).expanduser().absolute()
        if place.exists():
            if problem := _kind_problem(place.stat().st_mode, kind):
                return problem, f"Write the path of a {kind}, in it if it is a directory"
            if not os.access(place, os.W_OK):
                return "may not be written by you", "Write another path"
            if kind == "file":
                return None
        above = next(each for each in (place, *place.parents) if each.exists())
        if not above.is_dir():
            return f"{above} is no directory", "Write another path"
        if not os.access(above, os.W_OK | os.X_OK):
            return f"{above} may not be written by you", "Write another path"
        if problem := _making_problem(above):
            return f"nothing can be made in {above}: {problem}", "Write another path"
    except OSError as error:
        return f"cannot be written: {error.strerror}", "Write another path"
    except (RuntimeError, ValueError) as error:
        return f"cannot be written: {error}", "Write another path"
    return None


def _making_problem(folder: Path) -> str | None:
    """Why nothing can be made in ``folder``; None if something can."""
    try:
        os.close(os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o600))
    except OSError:  # of many file systems, as NFS, which have no nameless files
        try:
            os.rmdir(tempfile.mkdtemp(dir=folder))
        except OSError as error:
            return error.strerror
    return None


def place_of(path: str | Path) -> str:
    """The place that ``path`` means, to compare with others; unlike ``Path.resolve``, for links in a circle too."""
    return os.path.realpath(os.path.expanduser(path))


def _kind_problem(mode: int, kind: str) -> str | None:
    fits = stat.S_ISDIR(mode) if kind == "directory" else stat.S_ISREG(mode)
    return None if fits else f"is {KINDS.get(stat.S_IFMT(mode), 'something else')}, and no {kind}"
