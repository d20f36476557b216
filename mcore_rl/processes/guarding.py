"""Starts guards (``mcore_rl.processes.guard``), beside a program and around one."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO

from mcore_rl.processes import guard
from mcore_rl.secrets import without_secrets

END_S = 10.0  # for a guard to kill what is below it


def start_guard(
    ends: Sequence[int],
    *,
    grace_s: float,
    group: int | None = None,
    processes: Sequence[int] = (),
    folder: str | None = None,
) -> subprocess.Popen[bytes]:
    """Starts a guard with the arguments of ``guard.beside``; it has copies of all descriptors among them."""
    told = {"ends": [*ends], "grace_s": grace_s, "group": group, "processes": [*processes], "folder": folder}
    return subprocess.Popen(
        [sys.executable, "-I", "-S", guard.__file__, "beside", json.dumps(told)],
        stdin=subprocess.DEVNULL,
        pass_fds=[*ends, *processes],
        start_new_session=True,  # a signal to this program's process group must not end the guard
        env=without_secrets(),
    )


@contextmanager
def guard_beside(
    *, grace_s: float, processes: Sequence[int] = (), folder: str | None = None, limit_s: float | None = None
) -> Iterator[None]:
    """Lets a guard end ``processes`` and remove ``folder`` on exit, or once this program has been killed.

    limit_s: that the guard may take on exit.
    """
    reading, writing = os.pipe()
    process = start_guard([reading], grace_s=grace_s, processes=processes, folder=folder)
    os.close(reading)
    try:
        yield
    finally:
        os.close(writing)
        process.wait(limit_s)


class GuardedProgram:
    """A Python program below a guard, which ends with all that it started, daemons too, and with this process.

    Not multiprocessing: that would import the main program, and with it torch.

    module: has ``main``, which is called with the descriptor of its end of ``socket``; found on our ``sys.path``.
    environment: its variables.
    shows: whether ``output`` has what it prints; else that goes nowhere.
    socket: our end; whoever uses it closes it.
    """

    def __init__(self, module: str, environment: dict[str, str], *, shows: bool = False) -> None:
        self.socket, theirs = socket.socketpair()
        with theirs:
            self._start(module, theirs, environment, shows=shows)

    def _start(self, module: str, theirs: socket.socket, environment: dict[str, str], *, shows: bool) -> None:
        paths = json.dumps([str(path) for path in sys.path])
        code = f"import json, sys; sys.path[:] = json.loads(sys.argv[2]); from {module} import main"
        command = [sys.executable, "-P", "-c", f"{code}; main(int(sys.argv[1]))", str(theirs.fileno()), paths]
        reading, writing = os.pipe()
        self._alive = os.fdopen(writing, "wb", buffering=0)
        try:
            self._guard = subprocess.Popen(
                guarded(command, reading),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if shows else subprocess.DEVNULL,
                stderr=subprocess.STDOUT,
                bufsize=0,
                pass_fds=[reading, theirs.fileno()],
                env=environment,
                start_new_session=True,  # Ctrl-C does not reach it
            )
        except BaseException:
            self.kill()
            raise
        finally:
            os.close(reading)

    @property
    def guard(self) -> int:
        """The guard's process id: the program and all that it started are below it."""
        return self._guard.pid

    @property
    def output(self) -> IO[bytes]:
        """What the program prints.  Whoever reads it closes it."""
        assert self._guard.stdout is not None
        return self._guard.stdout

    def kill(self) -> None:
        """Lets the guard kill them all, and does not wait; idempotent."""
        self._alive.close()

    def end(self) -> int:
        """Kills them all, and returns the program's exit code as ``subprocess`` gives it: -9 for SIGKILL."""
        self.kill()
        try:
            code = self._guard.wait(END_S)
        except subprocess.TimeoutExpired:  # the program stopped its guard; without it, it is killed by the kernel
            self._guard.kill()
            code = self._guard.wait()
        return code if code <= 128 else 128 - code


def guarded(command: Sequence[str], alive: int) -> list[str]:
    """The command line of a guard around ``command``.  alive: the read end of a pipe; they end when it closes."""
    return [sys.executable, "-I", "-S", guard.__file__, "around", str(alive), *command]
