"""A small process beside a program that started Ray: when the program has ended, however, it ends what is left of Ray.

Ray's head and raylet die with the program, but two of the raylet's agents would wait a minute for the head.  It is run
as a file, not as a module of the package, so that it starts in milliseconds.

Arguments: the read end of a pipe that closes when the program ends, and a pidfd of each process of Ray (unlike a
process id, a pidfd is never reused).
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Sequence

GRACE_S = 5.0  # how long a regular shutdown of Ray may take


def main(descriptor: int, processes: Sequence[int]) -> None:
    """Waits for the program's end, then kills the ``processes`` that are still alive after ``GRACE_S``."""
    os.read(descriptor, 1)
    until, poller, left = time.monotonic() + GRACE_S, select.poll(), set(processes)
    for process in processes:
        poller.register(process, select.POLLIN)  # readable once the process has ended
    while left and (remaining_s := until - time.monotonic()) > 0:
        for process, _ in poller.poll(1000 * remaining_s):
            poller.unregister(process)
            left.remove(process)
    for process in left:
        try:
            signal.pidfd_send_signal(process, signal.SIGKILL)
        except ProcessLookupError:
            continue


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # as Slurm sends to all processes of a job
        signal.signal(number, signal.SIG_IGN)
    main(int(sys.argv[1]), [int(word) for word in sys.argv[2:]])
