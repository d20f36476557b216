"""A guard ends what a program left, once that has ended, and does not end before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mcore_rl.processes.guarding import start_guard
from tests.support.guards import tell_to_end

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@contextmanager
def sleeper(*words: str, of: int | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A process in group ``of``; None: in one of its own."""
    with subprocess.Popen([*SLEEP, *words], process_group=0 if of is None else of) as process:
        yield process
        process.kill()


@pytest.fixture
def program() -> Iterator[tuple[int, int]]:
    """Both ends of a pipe, of which the second stands for a program: closed, it has ended."""
    reading, writing = os.pipe()
    yield reading, writing
    os.close(reading)


def test_processes_end_with_the_program_though_the_guard_was_told_to_end(
    program: tuple[int, int], processes: None
) -> None:
    reading, writing = program
    with sleeper() as left:
        handle = os.pidfd_open(left.pid)
        guard = start_guard([reading], grace_s=0.5, processes=[handle])
        os.close(handle)
        tell_to_end(guard.pid)
        assert left.poll() is None
        os.close(writing)
        assert guard.wait(60) == 0
        assert left.wait(60) == -signal.SIGKILL


def test_a_group_ends_but_for_its_resource_tracker(program: tuple[int, int], processes: None, tmp_path: Path) -> None:
    reading, writing = program
    (tmp_path / "folder").mkdir()
    with sleeper() as leader, sleeper(of=leader.pid) as member, sleeper("resource_tracker", of=leader.pid) as tracker:
        guard = start_guard([reading], grace_s=0.5, group=leader.pid, folder=str(tmp_path / "folder"))
        os.close(writing)
        assert guard.wait(60) == 0
        assert [leader.wait(60), member.wait(60)] == [-signal.SIGKILL] * 2
        assert tracker.poll() is None
    assert not (tmp_path / "folder").exists()


def test_processes_have_time_to_end_by_themselves(program: tuple[int, int], processes: None) -> None:
    reading, writing = program
    with sleeper() as left:
        handle = os.pidfd_open(left.pid)
        guard = start_guard([reading], grace_s=600.0, processes=[handle])
        os.close(handle)
        os.close(writing)
        time.sleep(0.5)
        assert left.poll() is None
        left.terminate()
        assert guard.wait(60) == 0
        assert left.wait(60) == -signal.SIGTERM


def test_a_folder_that_comes_back_is_removed_again(program: tuple[int, int], processes: None, tmp_path: Path) -> None:
    """By a process of the killed program that still writes."""
    reading, writing = program
    folder = tmp_path / "folder"
    folder.mkdir()
    guard = start_guard([reading], grace_s=3.0, folder=str(folder))
    os.close(writing)
    until = time.monotonic() + 30
    for _ in range(4):
        while folder.exists():
            assert time.monotonic() < until
            time.sleep(0.01)
        folder.mkdir()
    assert guard.wait(60) == 0 and not folder.exists()
