"""Guards are told to end, as Slurm tells all processes of a job, and do not."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def tell_to_end(guard: int) -> None:
    """Sends SIGTERM to the process ``guard`` once it has begun; raises AssertionError if it does not ignore that."""
    until = time.monotonic() + 30
    while not _ignores_sigterm(guard):
        assert time.monotonic() < until, f"{guard} does not ignore SIGTERM"
        time.sleep(0.01)
    os.kill(guard, signal.SIGTERM)


def _ignores_sigterm(process: int) -> bool:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    (ignored,) = [int(line.split()[1], 16) for line in lines if line.startswith("SigIgn:")]
    return bool(ignored >> (signal.SIGTERM - 1) & 1)
