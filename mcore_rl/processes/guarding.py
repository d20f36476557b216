"""Starts guards: see ``mcore_rl.processes.guard``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

from mcore_rl.processes import guard
from mcore_rl.tracking.secrets import without_secrets


def start_guard(
    ends: Sequence[int],
    *,
    grace_s: float,
    group: int | None = None,
    processes: Sequence[int] = (),
    folder: str | None = None,
) -> subprocess.Popen[bytes]:
    """Starts a guard with the arguments of ``guard.main``; it has copies of all descriptors among them."""
    told = {"ends": [*ends], "grace_s": grace_s, "group": group, "processes": [*processes], "folder": folder}
    return subprocess.Popen(
        [sys.executable, "-I", "-S", guard.__file__, json.dumps(told)],
        stdin=subprocess.DEVNULL,
        pass_fds=[*ends, *processes],
        start_new_session=True,  # a signal to this program's process group must not end the guard
        env=without_secrets(),
    )
