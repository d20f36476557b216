"""Other projects' code that ours is held against, imported from beside the environment.

``tools/set_up_oracles.sh`` puts the packages of ``tests/oracles.txt`` into one folder.  Where there is no such folder a
test skips.  Where it is there, a package that cannot be imported is an error, whatever the reason.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.skips import not_installed

FOLDER = Path(sys.prefix) / "oracles"


@contextmanager
def oracles(name: str) -> Iterator[None]:
    """Within: packages are imported from the folder too, behind all that is in the environment.

    After: they no longer are, and the environment's variables are those of before.  What was imported stays so, because
    compiled modules cannot be imported twice.  name: the package that the test is about, for a person to read.
    """
    if not FOLDER.is_dir():
        pytest.skip(not_installed(name))
    variables = dict(os.environ)
    sys.path.append(str(FOLDER))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(FOLDER))
        for variable in os.environ.keys() - variables.keys():
            del os.environ[variable]
        os.environ.update(variables)
