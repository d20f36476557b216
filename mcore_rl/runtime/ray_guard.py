"""A small process beside a program that started Ray: once that is gone, however it ended, it ends what is left of Ray.

Ray's head and raylet die with the program, but two of the raylet's agents then wait a minute for the head.  Run as a
file, not as a module of the package, so that it starts in milliseconds.

Arguments: a descriptor that ends when the program does, and one of each process (a pidfd, which never names another).
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Sequence

GRACE_S = 5.0  # for a Ray that was shut down in order


def main(descriptor: int, processes: Sequence[int]) -> None:
    """Wait, and clean up."""
    os.read(descriptor, 1)
    until, poller, left = time.monotonic() + GRACE_S, select.poll(), set(processes)
    for process in processes:
        poller.register(process, select.POLLIN)  # it has ended
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
    main(int(sys.argv[1]), [int(word) for word in sys.argv[2:]])
