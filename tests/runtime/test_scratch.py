"""A run's private folder: nobody else enters it, all temporary files are in it, and nothing of it stays."""

from __future__ import annotations

import os
import pwd
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from mcore_rl.processes import guard
from mcore_rl.runtime.scratch import MAX_BASE, scratch
from tests.support.guards import tell_to_end
from tests.support.outsider import as_another_user

KILLED = """
import sys, tempfile, time
from mcore_rl.runtime.scratch import scratch
with scratch() as folder:
    (folder / "ray").mkdir(mode=0o777)
    tempfile.mkdtemp()
    print(folder, flush=True)
    time.sleep(600)
"""


def test_temporary_files_are_in_it_and_it_goes(processes: None) -> None:
    before = tempfile.gettempdir()
    with scratch() as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert os.environ["TMPDIR"] == tempfile.gettempdir() == str(folder)
        Path(tempfile.mkdtemp()).joinpath("file").write_text("something")
        look = "try: print(os.listdir(sys.argv[1]))\nexcept PermissionError: print('kept out')"
        if os.getuid() == 0:
            assert as_another_user(look, folder) == "kept out\n"
    assert not folder.exists() and tempfile.gettempdir() == before


def test_a_program_without_a_home_has_the_user_s(monkeypatch: pytest.MonkeyPatch, processes: None) -> None:
    monkeypatch.delenv("HOME")
    with scratch():
        assert os.environ["HOME"] == pwd.getpwuid(os.getuid()).pw_dir
    assert "HOME" not in os.environ
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as where the system does not know the user
    with scratch() as folder:
        assert os.environ["HOME"] == str(folder)


def test_a_long_folder_for_temporary_files_has_no_room_for_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: None
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * MAX_BASE)))
    with scratch() as folder:
        assert folder.parent == Path("/tmp")
        session = folder / "ray" / "session_2026-11-23_07-58-46_250657_4194303" / "sockets" / "plasma_store"
        assert len(str(session)) <= 107


def test_it_goes_when_its_program_is_killed(processes: None) -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED], stdout=-1, text=True) as program:
        assert program.stdout is not None
        folder = Path(program.stdout.readline().strip())
        assert folder.is_dir()
        (its_guard,) = [each.pid for each in psutil.Process(program.pid).children() if guard.__file__ in each.cmdline()]
        tell_to_end(its_guard)
        program.send_signal(signal.SIGKILL)
    end = time.monotonic() + 120  # it takes a moment; a busy machine, longer
    while folder.exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not folder.exists()
