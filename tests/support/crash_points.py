"""``mcore-rl train`` that kills itself, by SIGKILL, at an exact point of giving the checkpoint of step 2 its name.

python -m tests.support.crash_points POINT train ...
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mcore_rl.checkpoints.manifest import MANIFEST
from mcore_rl.controller.lifecycle import run_checkpoints

STEP = 2
HALF, BEFORE, AFTER = "half a manifest", "before the rename", "after the rename"


def die() -> None:
    """Kill this process at once."""
    os.kill(os.getpid(), signal.SIGKILL)


def arm(point: str) -> None:
    """Let this process die at ``point``."""
    write: Callable[..., None] = run_checkpoints.write_manifest
    rename: Callable[[Path, Path], None] = run_checkpoints.replace_directory

    def write_manifest(directory: Path, sums: Mapping[str, Any]) -> None:
        write(directory, sums)
        if point == HALF and directory.name.startswith(f"step_{STEP}."):
            path = directory / MANIFEST
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
            die()

    def replace_directory(fresh: Path, target: Path) -> None:
        meant = target.name == f"step_{STEP}"
        if meant and point == BEFORE:
            die()
        rename(fresh, target)
        if meant and point == AFTER:
            die()

    assert point in (HALF, BEFORE, AFTER), point
    run_checkpoints.write_manifest, run_checkpoints.replace_directory = write_manifest, replace_directory


if __name__ == "__main__":
    from mcore_rl.cli import main

    arm(sys.argv[1])
    sys.exit(main(sys.argv[2:]))
