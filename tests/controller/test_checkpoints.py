"""A checkpoint is whole under its name or not there, whenever the run was killed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mcore_rl.config.trainer import ResumeMode, TrainerConfig
from mcore_rl.controller import checkpoints
from mcore_rl.controller.checkpoints import (
    STATE,
    Progress,
    begin,
    complete_checkpoints,
    finish,
    read_progress,
    replace_directory,
    set_aside_later,
    to_resume,
)
from mcore_rl.errors import CheckpointError, ConfigError


class KilledError(BaseException):
    """The run is over here."""


def write(run_dir: Path, step: int, max_to_keep: int | None = None, text: str = "weights") -> Path:
    path = begin(run_dir, step, ["actor"])
    (path / "actor" / "rank_00000.pt").write_text(text)
    return finish(path, Progress(step=step), max_to_keep)


def steps(run_dir: Path) -> list[int]:
    """Of the complete checkpoints, each of which has its weights."""
    found = complete_checkpoints(run_dir)
    assert all((path / "actor" / "rank_00000.pt").is_file() for path in found)
    return [read_progress(path).step for path in found]


@contextmanager
def killed_at(monkeypatch: pytest.MonkeyPatch, number: int) -> Iterator[None]:
    """At the ``number``-th change of the file system from here on, which is not done; the block must reach it."""
    count = 0

    def counted(change: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*args: object, **options: object) -> object:
            nonlocal count
            count += 1
            if count == number:
                raise KilledError
            return change(*args, **options)

        return wrapped

    def slow_rmtree(path: Path, ignore_errors: bool = False) -> None:
        """Entry by entry, in the worst order: what says that it is complete goes last."""
        if not Path(path).exists():
            return
        for each in sorted(Path(path).iterdir(), key=lambda entry: entry.name == STATE):
            counted(real_rmtree if each.is_dir() else real_unlink)(each)
        counted(Path.rmdir)(path)

    real_rmtree, real_unlink = shutil.rmtree, Path.unlink
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", slow_rmtree)
        for name in ("rename", "write_text", "unlink", "mkdir"):
            patched.setattr(Path, name, counted(getattr(Path, name)))
        with pytest.raises(KilledError):
            yield


def test_checkpoints_come_in_the_order_of_their_steps(tmp_path: Path) -> None:
    for step in (100, 20, 3):
        write(tmp_path, step)
    assert steps(tmp_path) == [3, 20, 100]
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step_3", "step_20", "step_100"]
    assert complete_checkpoints(tmp_path / "nowhere") == []


def test_what_is_incomplete_is_never_resumed(tmp_path: Path) -> None:
    trainer = TrainerConfig(default_local_dir=str(tmp_path))
    assert to_resume(trainer) is None
    write(tmp_path, 2)
    begin(tmp_path, 4, ["actor"])
    (tmp_path / "checkpoints" / "step_6").mkdir()
    assert to_resume(trainer) == tmp_path / "checkpoints" / "step_2"
    path = begin(tmp_path, 4, ["actor", "critic"])
    assert sorted(entry.name for entry in path.iterdir()) == ["actor", "critic"], "a fresh one"
    assert to_resume(TrainerConfig(default_local_dir=str(tmp_path), resume_mode=ResumeMode.off)) is None


def test_a_named_checkpoint_must_be_complete(tmp_path: Path) -> None:
    there, mode = write(tmp_path, 2), ResumeMode.path
    assert to_resume(TrainerConfig(resume_mode=mode, resume_from_path=str(there))) == there
    for wrong in (tmp_path / "checkpoints", tmp_path / "nowhere", begin(tmp_path, 3, ["actor"])):
        with pytest.raises(ConfigError, match=r"trainer\.resume_from_path=.*is no complete checkpoint.*Give a direct"):
            to_resume(TrainerConfig(resume_mode=mode, resume_from_path=str(wrong)))


def test_progress_comes_back_as_it_was(tmp_path: Path) -> None:
    progress = Progress(step=7, sampler={"epoch": 1, "carried": [3, 4]}, kl={"coef": 0.1 + 0.2}, best=0.5, best_step=6)
    assert read_progress(finish(begin(tmp_path, 7, ["actor"]), progress, None)) == progress


@pytest.mark.parametrize("text", ["", "{", "[]", json.dumps({"steps": 3})])
def test_progress_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, 1)
    (path / STATE).write_text(text)
    with pytest.raises(CheckpointError, match=r"step_1: 1 problem:\n.*controller.json cannot be read: .*another step"):
        read_progress(path)


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        write(tmp_path, step, max_to_keep=2)
    assert steps(tmp_path) == [3, 10]
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step_3", "step_10"}


@pytest.mark.parametrize("number", range(1, 8))
def test_killed_while_it_saves_there_is_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    write(tmp_path, 1)
    write(tmp_path, 2)
    path = begin(tmp_path, 3, ["actor"])
    (path / "actor" / "rank_00000.pt").write_text("new")
    changes = 6  # controller.json, unlink, rename; of the oldest: controller.json, weights, directory
    if number > changes:
        finish(path, Progress(step=3), max_to_keep=2)
        assert steps(tmp_path) == [2, 3]
        return
    with killed_at(monkeypatch, number):
        finish(path, Progress(step=3), max_to_keep=2)
    assert steps(tmp_path) in ([1, 2], [1, 2, 3], [2, 3])
    write(tmp_path, 4, max_to_keep=2)
    assert steps(tmp_path)[-1] == 4 and len(steps(tmp_path)) == 2


@pytest.mark.parametrize("number", range(1, 8))
def test_killed_while_the_same_step_is_saved_again_there_is_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    write(tmp_path, 1)
    write(tmp_path, 2, text="old")
    path = begin(tmp_path, 2, ["actor"])
    (path / "actor" / "rank_00000.pt").write_text("new")
    if number > 5:  # controller.json; of the old one: controller.json, weights, directory; rename
        finish(path, Progress(step=2), None)
        assert (tmp_path / "checkpoints" / "step_2" / "actor" / "rank_00000.pt").read_text() == "new"
        return
    with killed_at(monkeypatch, number):
        finish(path, Progress(step=2), None)
    assert steps(tmp_path) in ([1, 2], [1])


@pytest.mark.parametrize("number", range(1, 8))
def test_killed_while_a_directory_is_replaced_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def directory(name: str, text: str) -> Path:
        path = tmp_path / name
        path.mkdir()
        (path / "a").write_text(text)
        (path / "b").write_text(text)
        return path

    def text_of(path: Path) -> str | None:
        """Where it is whole."""
        texts = {(path / name).read_text() if (path / name).is_file() else None for name in "ab"}
        return texts.pop() if len(texts) == 1 else None

    target, aside = directory("final", "old"), directory("final.old", "older")
    fresh = directory("final.new", "new")
    if number < 7:
        with killed_at(monkeypatch, number):
            replace_directory(fresh, target)
        assert text_of(target) in ("old", "new") or text_of(fresh) == "new"
        if not fresh.exists():
            directory("final.new", "new")
    replace_directory(fresh, target)
    assert text_of(target) == "new" and not fresh.exists() and not aside.exists()


def test_another_course_of_the_run_is_set_aside(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        write(tmp_path, step, text=f"first {step}")
    set_aside_later(tmp_path, 2)
    assert steps(tmp_path) == [2]
    write(tmp_path, 3, max_to_keep=1)
    assert steps(tmp_path) == [3], "the new one is kept"
    assert to_resume(TrainerConfig(default_local_dir=str(tmp_path))) == tmp_path / "checkpoints" / "step_3"
    set_aside_later(tmp_path, 3)
    set_aside_later(tmp_path, 0)
    earlier = tmp_path / "checkpoints" / "earlier"
    found = sorted(str(path.relative_to(earlier)) for path in earlier.glob("*/*"))
    assert found == ["1/step_4", "1/step_6", "2/step_3"]
    assert (earlier / "1" / "step_6" / "actor" / "rank_00000.pt").read_text() == "first 6"
    assert checkpoints.read_progress(earlier / "1" / "step_6").step == 6
