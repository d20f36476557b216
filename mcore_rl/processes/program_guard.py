"""A small process around a user's program: it ends with all that it started, however it ends, and with whoever ran it.

It is the program's parent and adopts what the program leaves behind (a subreaper), so that a child that forked twice,
or has a session of its own, is found all the same.  This file is run by its path, not as a module of the package, so
that it starts in milliseconds.

Arguments: the read end of a pipe that closes when the program is to end, then the program's command line.  Its exit
code is the program's, or 128 and the number of the signal that ended it; 127: there is no such program.
``mcore_rl.processes.guarding`` starts it.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
# Slurm sends all processes of a step what it is told to, and SIGTERM at the job's end.
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
LOOK_S = 0.1  # between two looks, where the kernel has no pidfd


def main(alive: int, command: list[str]) -> int:
    """Runs ``command`` until it ends or ``alive`` closes; returns its exit code."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.set_inheritable(alive, False)
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)  # the pipe says when
    program = os.fork()
    if program == 0:
        try:
            for number in IGNORED:
                signal.signal(number, signal.SIG_DFL)
            os.setsid()
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            os.execvp(command[0], command)
        except OSError as error:
            os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(127)
    try:
        code = _wait(program, alive)
    finally:
        _end_all()
    return code


def _wait(program: int, alive: int) -> int:
    """The exit code of ``program``, which is killed once ``alive`` closes."""
    try:
        ended = [os.pidfd_open(program)]
    except (AttributeError, OSError):
        ended = []
    while True:
        ready, _, _ = select.select([alive, *ended], [], [], None if ended else LOOK_S)
        if alive in ready:
            os.kill(program, signal.SIGKILL)  # one that is ending by itself keeps its own exit code
        pid, status = os.waitpid(program, 0 if alive in ready else os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _end_all() -> None:
    """Kills every process below this one, until there is none."""
    while True:
        for pid in _below():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def _below() -> list[int]:
    """The processes below this one."""
    parents = dict[int, int]()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(path.name)] = int((path / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
        except OSError:  # it has just ended
            continue
    known = {os.getpid()}
    descendants = list[int]()
    while True:
        more = [pid for pid, parent in parents.items() if parent in known and pid not in known]
        if not more:
            return descendants
        known.update(more)
        descendants += more


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
