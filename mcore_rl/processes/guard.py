"""A small process beside a program: once that has ended, in whatever way, it ends what the program left and removes it.

vLLM's processes wait for ever if the process that started them is killed, two agents of Ray's wait a minute for their
head, and a program that is stopped (SIGSTOP) does not notice that its parent is gone.

``mcore_rl.processes.guarding`` starts it: as a file, not as a module of the package, so that it starts in milliseconds.
Its one argument is an object of ``main``'s arguments, in JSON.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


def main(ends: Sequence[int], grace_s: float, group: int | None, processes: Sequence[int], folder: str | None) -> None:
    """Waits until one of ``ends`` closes; then ends ``group`` and ``processes``, and removes ``folder``.

    ends: the read ends of pipes that close when the program ends.
    grace_s: the seconds that processes have to end by themselves before they are killed.  Where there is none to
        end, ``folder`` is removed again and again for so long: processes of a killed program, which others end, may
        still write there.
    group: a process group.  Its resource trackers are left: they remove what killed processes shared, and then end.
    processes: pidfds; unlike a process id, a pidfd is never reused.
    """
    select.select(ends, [], [])
    until = time.monotonic() + grace_s
    if group is None and not processes and folder is not None and Path(folder).exists():
        while time.monotonic() < until:
            shutil.rmtree(folder, ignore_errors=True)
            time.sleep(0.2)
    while (alive_of_group(group) or alive_of(processes)) and time.monotonic() < until:
        time.sleep(0.05)
    for pid in alive_of_group(group):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for process in alive_of(processes):
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def alive_of_group(group: int | None) -> list[int]:
    """The process ids of ``group``, without resource trackers and zombies."""
    pids = list[int]()
    if group is None:
        return pids
    for path in Path("/proc").glob("[0-9]*"):
        try:
            state, _, its_group = (path / "stat").read_text().rpartition(")")[2].split()[:3]
            command = (path / "cmdline").read_bytes()
        except OSError:  # the process has just ended
            continue
        if int(its_group) == group and state not in "ZX" and b"resource_tracker" not in command:
            pids.append(int(path.name))
    return pids


def alive_of(processes: Sequence[int]) -> list[int]:
    """Those of ``processes``, pidfds, that have not ended: a pidfd is readable once its process has."""
    ended, _, _ = select.select(processes, [], [], 0)
    return [process for process in processes if process not in ended]


if __name__ == "__main__":
    # Slurm sends all processes of a step what it is told to, as train.sbatch tells it, and SIGTERM at the job's end.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    main(**json.loads(sys.argv[1]))
