"""Copies of a model on a node's own disk: whole or not there at all."""

from __future__ import annotations

import os
import shutil
import threading
from collections import namedtuple
from pathlib import Path

import pytest

from mcore_rl.ground.errors import ConfigError
from mcore_rl.runtime import stage_model
from mcore_rl.runtime.stage_model import main, stage

WEIGHTS = "model.safetensors"
READ = {"config.json": b"{}", WEIGHTS: bytes(range(256)) * 5000, "tokenizer.json": b"[1]", "chat_template.jinja": b"x"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """As a snapshot of the Hub's cache: links, and weights of other formats beside those that are read."""
    blobs, model = tmp_path / "blobs", tmp_path / "shared" / "model"
    blobs.mkdir(), (model / "original").mkdir(parents=True)
    for name, content in READ.items():
        (blobs / name).write_bytes(content)
        (model / name).symlink_to(blobs / name)
    (model / "pytorch_model.bin").write_bytes(b"old" * 1000)
    (model / "original" / "consolidated.00.pth").write_bytes(b"theirs" * 1000)
    return model


def contents(copy: Path) -> dict[str, bytes]:
    assert not any(each.is_symlink() for each in copy.iterdir())
    return {each.name: each.read_bytes() for each in copy.iterdir()}


def test_what_a_run_reads_is_copied_and_nothing_else(source: Path, tmp_path: Path) -> None:
    told: list[str] = []
    copy = stage(source, tmp_path / "disk", "7", told.append)
    assert copy == tmp_path / "disk" / "mcore-rl-7-model" and contents(copy) == READ
    assert len(told) == 1 and "0.00 GiB in " in told[0]
    stage_model.remove(tmp_path / "disk", "7")
    assert list((tmp_path / "disk").iterdir()) == []


def test_a_copy_that_stays_is_found_until_its_original_changes(source: Path, tmp_path: Path) -> None:
    told: list[str] = []
    first = stage(source, tmp_path, "", told.append)
    (first / WEIGHTS).chmod(0o400)
    assert stage(source, tmp_path, "", told.append) == first and "is there already" in told[-1]
    blob = (source / WEIGHTS).resolve()
    blob.write_bytes(bytes(len(READ[WEIGHTS])))  # as large, and another
    os.utime(blob, ns=(1, 1))
    second = stage(source, tmp_path, "", told.append)
    assert second != first and contents(second)[WEIGHTS] == bytes(len(READ[WEIGHTS]))


def test_what_a_killed_job_left_is_made_anew(source: Path, tmp_path: Path) -> None:
    for name, content in ((f"mcore-rl-7-model{stage_model.PARTIAL}", b"half"), ("mcore-rl-7-model", b"short")):
        (tmp_path / name).mkdir()
        (tmp_path / name / WEIGHTS).write_bytes(content)
    copy = stage(source, tmp_path, "7", lambda _: None)
    assert contents(copy) == READ
    assert [each.name for each in tmp_path.glob("mcore-rl-*")] == ["mcore-rl-7-model"]


def test_jobs_of_one_node_copy_once(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at once, the first held in the middle until the second has come to the lock."""
    copies, waits, told = [], threading.Event(), list[str]()
    real_copy, real_lock = stage_model._copy, stage_model.fcntl.flock

    def slow(*arguments: object) -> None:
        copies.append(1)
        assert waits.wait(60)
        real_copy(*arguments)  # type: ignore[arg-type]

    def locked(folder: int, how: int) -> None:
        if copies:
            waits.set()
        real_lock(folder, how)

    monkeypatch.setattr(stage_model, "_copy", slow)
    monkeypatch.setattr(stage_model.fcntl, "flock", locked)
    first = threading.Thread(target=stage, args=(source, tmp_path, "", told.append))
    first.start()
    while not copies:
        assert first.is_alive()
    staged = stage(source, tmp_path, "", told.append)
    first.join()
    assert len(copies) == 1 and contents(staged) == READ
    assert sorted("is there already" in each for each in told) == [False, True], "either thread may tell first"


def test_a_disk_without_room_is_refused_before_anything_is_copied(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2**40, 2**40, 2**20))
    disk = tmp_path / "disk"
    assert main(["--node", "n2", "--source", str(source), "--under", str(disk), "--job", "7"]) == 2
    said = capsys.readouterr()
    assert "n2: error: " in said.err and said.out == ""
    assert f"cluster.slurm.stage_model={disk}: the model has 0.00 GiB, and 0.00 GiB are free there" in said.err
    assert list(disk.iterdir()) == []


def test_a_file_that_changes_meanwhile_is_named_and_no_copy_is_left(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = stage_model._copy

    def grown(*arguments: object) -> None:
        with open(source / WEIGHTS, "ab") as file:
            file.write(b"more")
        real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(stage_model, "_copy", grown)
    with pytest.raises(ConfigError, match=f"changed while it was copied: {WEIGHTS}"):
        stage(source, tmp_path / "disk", "7", lambda _: None)
    assert list((tmp_path / "disk").iterdir()) == []


def test_what_is_no_checkpoint_or_no_folder_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*words: str) -> str:
        assert main(["--node", "n1", "--job", "7", *words]) == 2
        return capsys.readouterr().err

    disk = ["--under", str(tmp_path / "disk")]
    absent = tmp_path / "absent"
    assert f"model.path={absent}: cannot be read on this node: No such file" in said("--source", str(absent), *disk)
    (tmp_path / "empty").mkdir()
    assert "has no *.safetensors on this node" in said("--source", str(tmp_path / "empty"), *disk)
    monkeypatch.delenv("SCRATCH", raising=False)
    told = said("--source", str(source), "--under", "$SCRATCH/x")
    assert "cluster.slurm.stage_model=$SCRATCH/x: is '$SCRATCH/x' on this node, and no absolute path" in told
    (tmp_path / "file").touch()
    assert f"cluster.slurm.stage_model={tmp_path}/file: " in said(
        "--source", str(source), "--under", f"{tmp_path}/file"
    )
    monkeypatch.setenv("SCRATCH", str(tmp_path / "mine"))
    assert main(["--node", "n1", "--job", "7", "--source", str(source), "--under", "$SCRATCH"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/mine/mcore-rl-7-model\n"


def test_it_says_how_far_it_is(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_model, "TOLD_S", 0.0)
    monkeypatch.setattr(stage_model, "CHUNK_BYTES", 640_000)
    told: list[str] = []
    stage(source, tmp_path / "disk", "7", told.append)
    total = sum(map(len, READ.values()))
    assert told[0].startswith(f"{100 * 640_000 / total:.0f} %: ") or told[0].startswith("0 %: ")
    assert told[-2].startswith("100 %: ")
