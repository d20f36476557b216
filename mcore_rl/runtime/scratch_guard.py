"""A small process beside a program with a ``scratch`` folder: when the program has ended, however, it removes it.

It is run as a file, not as a module of the package, so that it starts in milliseconds.  Arguments: the read end of a
pipe that closes when the program ends, and the folder.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time

GRACE_S = 8.0  # for processes of a killed program: other guards end them meanwhile, and they may write until then


def main(descriptor: int, folder: str) -> None:
    """Waits for the program's end, and removes ``folder`` unless the program has, also if it comes back."""
    os.read(descriptor, 1)
    if not os.path.exists(folder):
        return
    until = time.monotonic() + GRACE_S
    while time.monotonic() < until:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.2)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # as Slurm sends to all processes of a job
        signal.signal(number, signal.SIG_IGN)
    main(int(sys.argv[1]), sys.argv[2])
