"""The process that does the math grader's algebra, and its limits: 5 s of processor time a question, 4 GiB of memory.

The kernel ends it where it computes for longer, also in C code and also if the caller is a thread: no signal of this
process is used.  What was asked then counts as not equal, and the next question starts another process, in about 1 s.
It ends with the pipe.  Messages are JSON; nothing is unpickled.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

LIMIT_S = 5.0  # of processor time
WAIT_S = 20.0  # by the clock, on a busy machine
START_S = 120.0
MEMORY_BYTES = 4 << 30
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from mcore_rl.rewards.symbolic_process import serve; serve(int(sys.argv[1]))"
)


class TooLongError(Exception):
    """The algebra needs more than ``LIMIT_S`` or ``MEMORY_BYTES``."""


class _Process:
    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            arguments = [str(theirs.fileno()), json.dumps([str(path) for path in sys.path])]
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._connection = Connection(ours.detach())
        self.answer(START_S)

    def ask(self, question: list[Any]) -> Any:
        self._connection.send_bytes(json.dumps(question).encode())
        return self.answer(WAIT_S)

    def answer(self, timeout_s: float) -> Any:
        if not self._connection.poll(timeout_s):
            raise TooLongError
        try:
            return json.loads(self._connection.recv_bytes(1 << 20))
        except (EOFError, OSError) as error:
            raise TooLongError from error

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._connection.close()


class Algebra:
    """The caller's side: one process, started with the first question; usable from any thread, one at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._owner = os.getpid()

    @property
    def pid(self) -> int | None:
        """The id of the process that runs now; None if there is none."""
        return None if self._process is None else self._process.process.pid

    def equal(self, gold: str, answer: str, limit_s: float | None = None) -> bool:
        """``symbolic.equal``; False if it needs longer than the limits."""
        return bool(self._ask("equal", [gold, answer], limit_s))

    def reads(self, latex: str) -> bool:
        """``symbolic.reads``; False if it needs longer than the limits."""
        return bool(self._ask("reads", [latex]))

    def last_statement(self, response: str) -> str | None:
        """``symbolic.last_statement``; None if it needs longer than the limits."""
        said = self._ask("last_statement", [response])
        return None if said is None else str(said)

    def _ask(self, name: str, arguments: list[str], limit_s: float | None = None) -> Any:
        with self._lock:
            if self._owner != os.getpid():  # a fork does not share its parent's process
                self._process = None
                self._owner = os.getpid()
            if self._process is not None and self._process.process.poll() is not None:
                self._drop()
            self._process = self._process or _Process()
            try:
                return self._process.ask([name, arguments, limit_s or LIMIT_S])
            except (TooLongError, OSError):
                self._drop()
                return None

    def _drop(self) -> None:
        if self._process is not None:
            self._process.end()
        self._process = None


def serve(descriptor: int) -> None:
    """Answers questions on the socket ``descriptor`` until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which ends the process
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit = min(MEMORY_BYTES, _hard_limit())
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    from mcore_rl.rewards import symbolic  # 1 s, so only here

    functions: dict[str, Callable[..., Any]] = {
        "equal": symbolic.equal,
        "reads": symbolic.reads,
        "last_statement": symbolic.last_statement,
    }
    with Connection(descriptor) as connection, suppress(EOFError, OSError):
        connection.send_bytes(b"true")
        while True:
            name, arguments, limit_s = json.loads(connection.recv_bytes())
            signal.setitimer(signal.ITIMER_PROF, limit_s)
            try:
                said = functions[name](*arguments)
            except Exception:  # noqa: BLE001  whatever sympy does with what a model wrote, MemoryError too
                said = None
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send_bytes(json.dumps(said).encode())


def _hard_limit() -> int:
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    return MEMORY_BYTES if hard == resource.RLIM_INFINITY else hard


ALGEBRA = Algebra()
