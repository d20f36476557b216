"""Python files of the user's as modules that every process imports by name, so that what they define can be pickled.

The name of a file's module is its path in hexadecimal, ``mcore_rl.config.user_files.file_2f...``.  The file must be at
the same path wherever a process of the run is.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

__path__: list[str] = []  # to Python, what has a path is a package, whose modules it asks the finder for
PREFIX = "file_"


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        if package != __name__:
            return None
        return importlib.util.spec_from_file_location(fullname, os.fsdecode(bytes.fromhex(name.removeprefix(PREFIX))))


sys.meta_path.append(_Finder())


def import_file(path: Path) -> ModuleType:
    """The module of the file ``path``, which runs once per process.  Raises whatever running it raises."""
    return import_module(f"{__name__}.{PREFIX}{os.fsencode(path.resolve()).hex()}")
