"""A small process that ends what a program left, once that has ended, in whatever way.

``beside`` a program: vLLM's processes wait for ever if the process that started them is killed, two agents of Ray's
wait a minute for their head, and a program that is stopped (SIGSTOP) does not notice that its parent is gone.
``around`` a user's program: it also ends when the program that ran it does.

``mcore_rl.processes.guarding`` starts it: as a file, not as a module of the package, and each part imports what it
needs, so that it starts in milliseconds.  Its arguments are ``beside`` and an object of that function's arguments, in
JSON; or ``around``, a descriptor and the program's command line.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
# Slurm sends all processes of a step what it is told to, as train.sbatch tells it, and SIGTERM at the job's end.
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
LOOK_S = 0.1  # between two looks, where the kernel has no pidfd


def beside(
    ends: Sequence[int], grace_s: float, group: int | None, processes: Sequence[int], folder: str | None
) -> None:
    """Waits until one of ``ends`` closes; then ends ``group`` and ``processes``, and removes ``folder``.

    ends: the read ends of pipes that close when the program ends.
    grace_s: the seconds that processes have to end by themselves before they are killed.  Where there is none to
        end, ``folder`` is removed again and again for so long: processes of a killed program, which others end, may
        still write there.
    group: a process group.  Its resource trackers are left: they remove what killed processes shared, and then end.
    processes: pidfds; unlike a process id, a pidfd is never reused.
    """
    import shutil

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


def around(alive: int, command: list[str]) -> int:
    """Runs ``command`` until it ends or ``alive`` closes, and ends all that it left; returns its exit code.

    It is the program's parent and adopts what the program leaves behind (a subreaper), so that a child that forked
    twice, or has a session of its own, is found all the same.

    alive: the read end of a pipe.
    Returns the program's code, or 128 and the number of the signal that ended it; 127: there is no such program.
    """
    import ctypes

    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.set_inheritable(alive, False)
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
    for _number in IGNORED:
        signal.signal(_number, signal.SIG_IGN)  # pipes say when
    if sys.argv[1] == "around":
        sys.exit(around(int(sys.argv[2]), sys.argv[3:]))
    import json

    beside(**json.loads(sys.argv[2]))
