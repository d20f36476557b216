"""A process of another user of this machine, who tries what he can with a port that he found."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests.support.skips import ANOTHER_USER

NOBODY = 65534
# Python may lie where only root can read, so the process becomes nobody's after its imports.
BECOME = f"import os, sys, socket, encodings.idna\nos.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"


def as_another_user(program: str, *arguments: object, imports: str = "", unset: Sequence[str] = ()) -> str:
    """What ``program`` prints, run as nobody after ``imports``; ``arguments`` are its ``sys.argv[1:]``.

    unset: variables that it does not inherit.
    """
    if os.getuid() != 0:
        pytest.skip(f"{ANOTHER_USER}only root can become another user")
    command = [sys.executable, "-c", f"{imports}\n{BECOME}{program}", *map(str, arguments)]
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    completed = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd="/", env=environment)
    assert completed.returncode == 0, completed.stderr
    return completed.stdout
