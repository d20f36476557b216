from __future__ import annotations

import errno
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from mcore_rl.checkpoints.new_directory import NewDirectory
from mcore_rl.ground.errors import CheckpointError


def test_it_has_its_name_only_when_it_is_complete(tmp_path: Path) -> None:
    made = NewDirectory(tmp_path / "deep" / "out", 10)
    (made.incomplete / "file").write_text("x")
    assert not made.path.exists()
    made.complete()
    assert [path.name for path in made.path.parent.iterdir()] == ["out"]
    assert (made.path / "file").read_text() == "x"


def test_everything_in_the_way_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()
    (tmp_path / "out.incomplete").mkdir()
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 2**30))
    with pytest.raises(CheckpointError) as refused:
        NewDirectory(tmp_path / "out", 2**31)
    holds, left, room = refused.value.problems
    assert "holds files" in holds
    assert "interrupted" in left
    assert "2.0 GiB are needed and 1.0 GiB are free" in room


def test_an_empty_directory_is_filled_and_a_file_is_not(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    NewDirectory(tmp_path / "empty", 0).complete()
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="is a file"):
        NewDirectory(tmp_path / "file", 0)


def test_errors_of_the_disk_name_the_file_and_the_remedy(tmp_path: Path) -> None:
    made = NewDirectory(tmp_path / "out", 0)
    with pytest.raises(CheckpointError, match=r"x: cannot be written: full\. Free some space .*remove it first"), (
        made.disk_errors(made.incomplete / "x")
    ):  # fmt: skip
        raise OSError(errno.ENOSPC, "full")
    assert not made.path.exists()
