"""A guarded program ends with all that it started, and its exit code is its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from mcore_rl.processes import guarding
from mcore_rl.processes.guarding import AskedProgram, GuardedProgram
from tests.support.daemons import DAEMON

PROGRAM = """
import os, signal, socket, sys, time

def main(descriptor: int) -> None:
    with socket.socket(fileno=descriptor) as connection:
        word = connection.recv(100).decode()
        if word.lstrip("-").isdigit():
            os.kill(os.getpid(), -int(word)) if int(word) < 0 else os._exit(int(word))
        pid = daemon()
        if word == "stop":
            os.kill(os.getppid(), signal.SIGSTOP)
        connection.sendall(str(pid).encode())
        time.sleep(600)
"""

ECHOES = """
import os
from multiprocessing.connection import Connection

def main(descriptor: int) -> None:
    with Connection(descriptor) as connection:
        while (word := connection.recv_bytes()) != b"end":
            connection.send_bytes(word)
    os._exit(3)
"""


def program(folder: Path, word: str) -> tuple[GuardedProgram, bytes]:
    """(a program that was told ``word``, its answer)."""
    (folder / "forks_twice.py").write_text(PROGRAM + DAEMON)
    made = GuardedProgram("forks_twice", dict(os.environ))
    with made.socket as ours:
        ours.sendall(word.encode())
        return made, ours.recv(100)


@pytest.mark.parametrize("code", [0, 7, -signal.SIGTERM, -signal.SIGSEGV])
def test_its_exit_code_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    made, answer = program(tmp_path, str(code))
    assert answer == b""  # the kernel closes a program's files before it has ended
    assert made.end() == code


@pytest.mark.parametrize("word", ["fork", "stop"])
def test_a_daemon_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    """Also where the program has stopped its guard: then only the program itself ends."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(guarding, "END_S", 2.0)
    made, answer = program(tmp_path, word)
    daemon, (below,) = psutil.Process(int(answer)), psutil.Process(made.guard).children()[:1]
    assert made.end() == -signal.SIGKILL
    below.wait(60)
    if word == "stop":
        daemon.kill()
    daemon.wait(60)


def test_a_daemon_ends_with_who_started_it(tmp_path: Path) -> None:
    starter = (
        "import os, sys, time\nfrom pathlib import Path\n"
        f"sys.path[:0] = [{str(tmp_path)!r}, {str(Path.cwd())!r}]\n"
        "from tests.processes.test_guarding import program\n"
        f"made, answer = program(Path({str(tmp_path)!r}), 'fork')\n"  # it would end with ``made``
        "print(int(answer), flush=True)\ntime.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            daemon = psutil.Process(int(process.stdout.readline()))
        finally:
            process.kill()
    until = time.monotonic() + 60
    while daemon.is_running() and time.monotonic() < until:
        time.sleep(0.02)
    assert not daemon.is_running()


def test_a_program_that_is_asked_answers_in_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "echoes.py").write_text(ECHOES)
    monkeypatch.syspath_prepend(tmp_path)
    asked = AskedProgram("echoes", dict(os.environ))
    asked.send(b"word")
    assert asked.answer(60.0, 100) == b"word" and not asked._connection.poll()
    with pytest.raises(TimeoutError):
        asked.answer(0.05, 100)
    asked.send(b"more than that")
    with pytest.raises(OSError, match="bad message length"):
        asked.answer(60.0, 4)
    asked.end()
    asked = AskedProgram("echoes", dict(os.environ))
    asked.send(b"end")
    with pytest.raises(EOFError):
        asked.answer(60.0, 100)
    assert asked._connection.poll() and asked.end() == 3
