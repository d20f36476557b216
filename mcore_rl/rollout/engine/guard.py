"""A small process beside an engine's, which kills what is left of the engine's process group once the engine is gone.

vLLM's own processes wait for ever if the process that started them is killed, and an engine that is stopped (SIGSTOP)
does not notice that its program is gone.  This file is run by its path, not as a
module of the package, so that it starts in milliseconds.  It does not kill resource trackers: these remove shared
memory and semaphores of killed processes, and then end by themselves.

Arguments: the read end of a pipe that closes when the engine's process ends, that of one that closes when the program
ends which started it, the engine's process group, and a folder to remove then.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path

GRACE_S = 3.0  # how long a regular shutdown of an engine may take


def main(engine: int, program: int, group: int, scratch: str) -> None:
    """Waits for the end of the engine or its program, then kills what is left of ``group`` and removes ``scratch``."""
    select.select([engine, program], [], [])
    until = time.monotonic() + GRACE_S
    while left(group) and time.monotonic() < until:
        time.sleep(0.05)
    for pid in left(group):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    shutil.rmtree(scratch, ignore_errors=True)


def left(group: int) -> list[int]:
    """The process ids of ``group``, without resource trackers and zombies."""
    pids = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            state, _, its_group = (path / "stat").read_text().rpartition(")")[2].split()[:3]
            command = (path / "cmdline").read_bytes()
        except OSError:  # the process has just ended
            continue
        if int(its_group) == group and state not in "ZX" and b"resource_tracker" not in command:
            pids.append(int(path.name))
    return pids


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # as Slurm sends to all processes of a job
        signal.signal(number, signal.SIG_IGN)
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
