"""Guards are told to end, as Slurm tells all processes of a job, and do not."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

TOLD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)  # by Slurm at the end of a job, and by train.sbatch


def tell_to_end(guard: int) -> None:
    """Sends ``TOLD`` to the process ``guard`` once it has begun; raises AssertionError if it does not ignore them."""
    until = time.monotonic() + 30
    while not _ignores(guard):
        assert time.monotonic() < until, f"{guard} does not ignore {TOLD}"
        time.sleep(0.01)
    for number in TOLD:
        os.kill(guard, number)


def _ignores(process: int) -> bool:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    (ignored,) = [int(line.split()[1], 16) for line in lines if line.startswith("SigIgn:")]
    return all(ignored >> (number - 1) & 1 for number in TOLD)
