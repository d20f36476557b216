"""Starts guards (``mcore_rl.processes.guard``), beside a program and around one.

A program of ours is run below a guard and spoken to over a socket: ``GuardedProgram``, in JSON lines where an event
loop waits for it, or ``AskedProgram``, in messages of bytes where a thread waits.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import IO

from mcore_rl.ground.secrets import without_secrets
from mcore_rl.processes import guard

END_S = 10.0  # for a guard to kill what is below it
LINE = 16 << 20  # bytes of a line


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
    socket: our end, open until ``end``.
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

    def first_answer(self, request: object, timeout_s: float) -> bytes:
        """The line that answers ``request``, JSON in a line; b"": the program ended.  OSError; TimeoutError."""
        self.socket.settimeout(timeout_s)
        self.socket.sendall(json.dumps(request).encode() + b"\n")
        with self.socket.makefile("rb", buffering=0) as file:  # what follows the line belongs to ``streams``
            return file.readline(LINE)

    async def streams(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The socket as streams of lines; opened once."""
        return await asyncio.open_connection(sock=self.socket, limit=LINE)

    def end(self) -> int:
        """Kills them all, and returns the program's exit code as ``subprocess`` gives it: -9 for SIGKILL."""
        self.kill()  # before the program could see that the socket is closed
        self.socket.close()
        try:
            code = self._guard.wait(END_S)
        except subprocess.TimeoutExpired:  # the program stopped its guard; without it, it is killed by the kernel
            self._guard.kill()
            code = self._guard.wait()
        return code if code <= 128 else 128 - code


class AskedProgram(GuardedProgram):
    """A guarded program that is asked by messages, one at a time, and has a time for each answer.

    Its ``main`` opens its end as a ``Connection``, too.  Any thread may ask, one at a time.
    """

    def __init__(self, module: str, environment: dict[str, str], *, shows: bool = False) -> None:
        super().__init__(module, environment, shows=shows)
        self._connection = Connection(self.socket.detach())

    def send(self, message: bytes) -> None:
        """Asks.  OSError: the program has ended."""
        self._connection.send_bytes(message)

    def answer(self, timeout_s: float, max_bytes: int) -> bytes:
        """The next message of the program.  TimeoutError; EOFError, OSError: it ended, or says more than that."""
        if not self._connection.poll(timeout_s):
            raise TimeoutError
        return self._connection.recv_bytes(max_bytes)

    def end(self) -> int:
        """See ``GuardedProgram.end``; the thread that waits for an answer gets an EOFError or OSError."""
        self.kill()
        self._connection.close()
        return super().end()


def guarded(command: Sequence[str], alive: int) -> list[str]:
    """The command line of a guard around ``command``.  alive: the read end of a pipe; they end when it closes."""
    return [sys.executable, "-I", "-S", guard.__file__, "around", str(alive), *command]
