"""One program owns a run directory: who is refused, whose ownership is over, and what becomes of a lost directory."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from mcore_rl.ground.errors import ConfigError, RunDirectoryError
from mcore_rl.tracking import run_owner
from mcore_rl.tracking.run_owner import OWNER, Owner, RunOwner, demand_free, read_owner

OTHER = Owner(host="n7", machine="another boot", pid=1, started=1, job="", job_starts=0, token="theirs")
PROGRAM = """
import sys, time
from pathlib import Path
from mcore_rl.tracking.run_owner import RunOwner
with RunOwner(Path(sys.argv[1]), say=print):
    print("owned", flush=True)
    time.sleep(600)
"""


def write(directory: Path, owner: Owner) -> Path:
    (directory / OWNER).write_text(json.dumps(asdict(owner)))
    return directory / OWNER


def own(directory: Path, said: list[str] | None = None) -> RunOwner:
    return RunOwner(directory, say=([] if said is None else said).append)


def refusal(directory: Path) -> str:
    with pytest.raises(ConfigError) as refused, own(directory):
        raise AssertionError("it was taken")
    return str(refused.value)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signs of life come every 50 ms."""
    monkeypatch.setattr(run_owner, "BEAT_S", 0.05)


@contextmanager
def touched(path: Path) -> Iterator[None]:
    """Within: somebody on another machine touches the file."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(0.02):
            os.utime(path)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_second_program_is_refused_until_the_first_has_ended(tmp_path: Path, processes: None) -> None:
    place = tmp_path / "runs" / "a"
    with subprocess.Popen([sys.executable, "-c", PROGRAM, str(place)], stdout=subprocess.PIPE) as first:
        assert first.stdout is not None and first.stdout.readline() == b"owned\n"
        said = refusal(place)
        assert said.startswith(f"1 problem in the configuration:\n  - trainer.default_local_dir={place}: belongs to")
        assert f"process {first.pid} on " in said and f"remove {place / OWNER}" in said
        assert [each.name for each in place.iterdir()] == [OWNER]
        first.kill()
        first.wait()
        with own(place):  # killed, it could not remove its file
            owner = read_owner(place / OWNER)
            assert owner is not None and owner.pid == os.getpid()
            assert "another run, which is going on" in refusal(place)
    assert not list(place.iterdir())


def test_whether_a_directory_may_be_had_is_told_without_a_change(tmp_path: Path) -> None:
    demand_free(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
    with own(tmp_path / "run"), pytest.raises(ConfigError, match="belongs to another run, which is going on: process"):
        demand_free(tmp_path / "run")
    demand_free(tmp_path / "run")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "file" / "run")
    with pytest.raises(ConfigError, match="file is no directory"):
        demand_free(tmp_path / "link")


def test_a_process_id_that_another_program_got_is_no_owner(tmp_path: Path) -> None:
    write(tmp_path, replace(Owner(), started=Owner().started - 1))
    with own(tmp_path) as held:
        assert held.check(pytest.fail) is None


def test_an_owner_on_another_machine_lives_as_long_as_it_shows_life(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, OTHER)
    with touched(path):
        assert "process 1 on n7" in refusal(tmp_path)
    assert read_owner(path) == OTHER
    monkeypatch.setattr(run_owner, "WATCH_S", 1.0)
    said: list[str] = []
    with own(tmp_path, said):
        assert read_owner(path) != OTHER
    assert said == [
        f"{tmp_path} belongs to process 1 on n7, since {OTHER.since}, of which nothing is known here: "
        "waiting up to 1 s for a sign of life"
    ]


def test_an_owner_shows_life(tmp_path: Path, quick: None) -> None:
    with own(tmp_path):
        first, until = run_owner._touched(tmp_path / OWNER), time.monotonic() + 60
        while run_owner._touched(tmp_path / OWNER) == first:
            assert time.monotonic() < until
            time.sleep(0.01)


@pytest.mark.parametrize(
    ("ours", "lives"),
    [
        (dict(job="5", job_starts=1), False),  # queued again after its node died
        (dict(job="5", job_starts=0), None),  # two programs of one job
        (dict(job="6"), True),  # squeue knows job 5
        (dict(job=""), True),
    ],
)
def test_a_job_of_slurm(ours: dict[str, object], lives: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_owner, "_job_runs", lambda job: {"5": True}[job])
    before = replace(OTHER, job="5", job_starts=0)
    assert before.lives(replace(Owner(), **ours)) is lives  # type: ignore[arg-type]
    assert "Slurm job 5" in str(before)


@pytest.mark.parametrize(
    ("script", "runs"),
    [
        ("echo RUNNING", True),
        ("echo SUSPENDED", True),
        ("true", False),  # it is over, and not forgotten yet
        ("echo slurm_load_jobs error: Invalid job id specified >&2; exit 1", False),
        ("echo Unable to contact slurm controller >&2; exit 1", None),
        (None, None),
    ],
)
def test_what_squeue_says_of_a_job(
    script: str | None, runs: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if script is not None:
        (tmp_path / "squeue").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if script else str(tmp_path))
    assert run_owner._job_runs("5") is runs


@pytest.mark.parametrize("stale", [True, False])
@pytest.mark.parametrize("links", [True, False])
def test_of_many_that_start_at_once_one_gets_on(
    stale: bool, links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not links:

        def none(*_: object) -> None:
            raise OSError(errno.EPERM, "no links here")

        monkeypatch.setattr(run_owner.os, "link", none)
    for number in range(20):
        place = tmp_path / str(number)
        place.mkdir()
        if stale:
            write(place, replace(Owner(), started=1))
        gate, done, owners = threading.Barrier(8), threading.Event(), list[RunOwner]()

        def start(place: Path, gate: threading.Barrier, done: threading.Event, owners: list[RunOwner]) -> None:
            gate.wait()
            try:
                with own(place) as held:
                    owners.append(held)
                    done.wait()
            except ConfigError:
                return

        threads = [threading.Thread(target=start, args=(place, gate, done, owners)) for _ in range(8)]
        for each in threads:
            each.start()
        until = time.monotonic() + 60
        while sum(each.is_alive() for each in threads) > 1 or not owners:
            assert time.monotonic() < until, owners
            time.sleep(0.005)
        assert len(owners) == 1
        done.set()
        for each in threads:
            each.join()
        assert not list(place.iterdir())


def test_a_start_that_fails_leaves_no_empty_folders(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), own(tmp_path / "runs" / "a"):
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())
    (tmp_path / "runs").mkdir()
    with own(tmp_path / "runs" / "a"):
        (tmp_path / "runs" / "a" / "config.yaml").touch()
    assert (tmp_path / "runs" / "a" / "config.yaml").exists()


def test_what_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "run"):
        assert "cannot be written" in refusal(place)


def test_a_directory_that_was_moved_or_removed_is_missed(tmp_path: Path) -> None:
    place = tmp_path / "run"
    with own(place) as held:
        assert held.check(pytest.fail) is None
        place.rename(tmp_path / "moved")
        gone = held.check(pytest.fail)
        assert gone is not None and gone.moved_to == tmp_path / "moved" == gone.places[0]
        place.mkdir()  # as by a writer of samples: it is not the same one
        assert held.check(pytest.fail) is not None
        shutil.rmtree(tmp_path / "moved")
        gone = held.check(pytest.fail)
        assert gone is not None and gone.moved_to is None and gone.places[0] == tmp_path / "run-rescued"
        assert str(gone) == f"the run directory {place} is no longer there: it was removed, or its file system is gone"


def test_a_file_that_was_removed_is_written_again_and_another_owner_ends_the_run(tmp_path: Path) -> None:
    with own(tmp_path) as held:
        (tmp_path / OWNER).unlink()
        said: list[str] = []
        assert held.check(said.append) is None and held.check(pytest.fail) is None
        assert said == [f"{tmp_path / OWNER} was removed while its run went on, and is written again"]
        write(tmp_path, OTHER)
        with pytest.raises(RunDirectoryError, match="owned by another run by now \\(process 1 on n7"):
            held.check(pytest.fail)
    assert read_owner(tmp_path / OWNER) == OTHER, "it is not ours to remove"
