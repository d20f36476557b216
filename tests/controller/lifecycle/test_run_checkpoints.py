"""A checkpoint is whole under its name or not there, whenever the run was killed; and what became of it is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mcore_rl.checkpoints.manifest import MANIFEST, damage
from mcore_rl.config.trainer import ResumeMode, TrainerConfig
from mcore_rl.controller.lifecycle import run_checkpoints
from mcore_rl.controller.lifecycle.run_checkpoints import (
    STATE,
    Progress,
    begin,
    complete_checkpoints,
    finish,
    lack_of_space,
    read_progress,
    remove_old,
    replace_directory,
    set_aside_later,
    to_resume,
)
from mcore_rl.ground.errors import CheckpointError, ConfigError

RANK = "rank_00000.safetensors"
CHANGES = 12  # of the file system, by a save and the removal of an old one


class KilledError(BaseException):
    """The run is over here."""


def started(run_dir: Path, step: int, text: str = "weights") -> Path:
    path = begin(run_dir, Progress(step=step), ["actor"])
    (path / "actor" / RANK).write_text(text)
    return path


def write(run_dir: Path, step: int, text: str = "weights") -> Path:
    return finish(started(run_dir, step, text), {})


def steps(run_dir: Path) -> list[int]:
    """Of the complete checkpoints, each of which is sound."""
    checkpoints = complete_checkpoints(run_dir)
    assert [damage(path) for path in checkpoints] == [[] for _ in checkpoints]
    return [read_progress(path).step for path in checkpoints]


class Told(list[str]):
    """Everything that was warned of."""

    def __call__(self, text: str) -> None:
        self.append(text)


def resume(run_dir: Path, told: Told | None = None) -> Path | None:
    return to_resume(TrainerConfig(default_local_dir=str(run_dir)), Told() if told is None else told)


@contextmanager
def killed_at(monkeypatch: pytest.MonkeyPatch, number: int) -> Iterator[list[str]]:
    """At the ``number``-th change of the file system from here on, which is not done.

    What is yielded is filled with the changes; a KilledError is in the end swallowed, where it comes so far.
    """
    done: list[str] = []

    def counted(change: Callable[..., object], name: str) -> Callable[..., object]:
        def wrapped(*args: object, **options: object) -> object:
            if len(done) + 1 == number:
                raise KilledError
            done.append(name)
            return change(*args, **options)

        return wrapped

    def slow_rmtree(path: Path, ignore_errors: bool = False) -> None:
        """Entry by entry, in the worst order: what says that it is complete goes last."""
        if not Path(path).exists():
            return
        for each in sorted(Path(path).iterdir(), key=lambda entry: entry.name == MANIFEST):
            counted(real_rmtree if each.is_dir() else real_unlink, "remove")(each)
        counted(Path.rmdir, "remove")(path)

    real_rmtree, real_unlink, real_open = shutil.rmtree, Path.unlink, Path.open

    def writing(path: Path, mode: str = "r", **options: str) -> object:
        opening = counted(real_open, "write") if "w" in mode else real_open
        return opening(path, mode, **options)

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", slow_rmtree)
        patched.setattr(Path, "open", writing)
        for name in ("rename", "unlink", "mkdir"):
            patched.setattr(Path, name, counted(getattr(Path, name), name))
        try:
            yield done
        except KilledError:
            done.append("killed")


def test_checkpoints_come_in_the_order_of_their_steps(tmp_path: Path) -> None:
    for step in (100, 20, 3):
        write(tmp_path, step)
    assert steps(tmp_path) == [3, 20, 100]
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step_3", "step_20", "step_100"]
    assert complete_checkpoints(tmp_path / "nowhere") == []


def test_the_newest_that_is_sound_is_resumed_and_the_others_are_named(tmp_path: Path) -> None:
    told = Told()
    assert resume(tmp_path, told) is None and told == []
    for step in (2, 4, 6, 8):
        write(tmp_path, step)
    assert resume(tmp_path, told) == tmp_path / "checkpoints" / "step_8" and told == []
    place = tmp_path / "checkpoints"
    (place / "step_8" / MANIFEST).unlink()
    (place / "step_6" / "actor" / RANK).write_text("Weights")
    (place / "step_4" / "actor" / RANK).write_text("wei")
    started(tmp_path, 10)
    assert resume(tmp_path, told) == place / "step_2"
    (said,) = told
    assert said.splitlines()[0] == "Resuming from step_2. Passed over:"
    assert "step_8: manifest.json is missing: it was never finished" in said
    assert f"step_6: actor/{RANK} has other bytes than were written" in said
    assert f"step_4: actor/{RANK} is 4 bytes short" in said
    assert "step_10.incomplete: it was being written when the run ended" in said
    off = TrainerConfig(default_local_dir=str(tmp_path), resume_mode=ResumeMode.off)
    assert to_resume(off, told) is None and len(told) == 1


def test_damage_alone_never_begins_a_run_anew(tmp_path: Path) -> None:
    (write(tmp_path, 2) / "actor" / RANK).unlink()
    with pytest.raises(CheckpointError) as refused:
        resume(tmp_path)
    assert refused.value.problems == (
        f"step_2: actor/{RANK} is missing",
        "No checkpoint is sound. Restore one, or begin anew with trainer.resume_mode=off",
    )


def test_a_run_that_was_killed_in_its_first_save_begins_anew_and_says_so(tmp_path: Path) -> None:
    started(tmp_path, 2)
    told = Told()
    assert resume(tmp_path, told) is None
    assert "the run begins anew" in told[0] and "step_2.incomplete" in told[0]


def test_a_named_checkpoint_must_be_sound(tmp_path: Path) -> None:
    there, mode = write(tmp_path, 2), ResumeMode.path
    assert to_resume(TrainerConfig(resume_mode=mode, resume_from_path=str(there)), Told()) == there
    for wrong in (tmp_path / "checkpoints", tmp_path / "nowhere", started(tmp_path, 3)):
        with pytest.raises(ConfigError, match=r"trainer\.resume_from_path=.*is no sound checkpoint.*Give a direct"):
            to_resume(TrainerConfig(resume_mode=mode, resume_from_path=str(wrong)), Told())
    (there / "actor" / RANK).write_text("Weights")
    with pytest.raises(ConfigError, match="has other bytes than were written"):
        to_resume(TrainerConfig(resume_mode=mode, resume_from_path=str(there)), Told())


def test_progress_comes_back_as_it_was(tmp_path: Path) -> None:
    progress = Progress(step=7, sampler={"epoch": 1, "carried": [3, 4]}, kl={"coef": 0.1 + 0.2}, best=0.5, best_step=6)
    assert read_progress(finish(begin(tmp_path, progress, ["actor"]), {})) == progress


@pytest.mark.parametrize("text", ["", "{", "[]", json.dumps({"steps": 3})])
def test_progress_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, 1)
    (path / STATE).write_text(text)
    with pytest.raises(CheckpointError, match=r"step_1: 1 problem:\n.*controller.json cannot be read: .*another step"):
        read_progress(path)


@pytest.mark.parametrize(
    ("max_to_keep", "keep_every", "best_step", "left"),
    [
        (None, None, -1, [1, 2, 3, 4, 5, 6, 10]),
        (2, None, -1, [6, 10]),
        (2, 2, -1, [2, 4, 6, 10]),
        (1, 3, 1, [1, 3, 6, 10]),
        (1, None, 5, [5, 10]),
        (9, None, -1, [1, 2, 3, 4, 5, 6, 10]),
    ],
)
def test_which_are_kept(
    tmp_path: Path, max_to_keep: int | None, keep_every: int | None, best_step: int, left: list[int]
) -> None:
    for step in (1, 2, 3, 4, 5, 6, 10):
        write(tmp_path, step)
    remove_old(tmp_path, TrainerConfig(max_to_keep=max_to_keep, keep_every=keep_every), best_step)
    assert steps(tmp_path) == left
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {f"step_{step}" for step in left}


@pytest.mark.parametrize("number", range(1, 15))
def test_killed_while_it_saves_there_is_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    trainer = TrainerConfig(max_to_keep=2)
    write(tmp_path, 1)
    write(tmp_path, 2)
    with killed_at(monkeypatch, number) as done:
        path = begin(tmp_path, Progress(step=3), ["actor"])
        (path / "actor" / RANK).write_text("new")
        finish(path, {})
        remove_old(tmp_path, trainer, -1)
    # Directories (tried from the innermost), controller.json, weights, manifest, its name; of the oldest: its name,
    # then what is in it.
    assert len(done) == min(number, CHANGES) and (done[-1] == "killed") == (number <= CHANGES), done
    assert steps(tmp_path) in ([1, 2], [1, 2, 3], [2, 3])
    named = [path for path in (tmp_path / "checkpoints").iterdir() if path.name.removeprefix("step_").isdecimal()]
    assert sorted(named) == complete_checkpoints(tmp_path), "what has its name is whole"
    assert resume(tmp_path) in [tmp_path / "checkpoints" / f"step_{step}" for step in (2, 3)]
    write(tmp_path, 4)
    remove_old(tmp_path, trainer, -1)
    assert steps(tmp_path)[-1] == 4 and len(steps(tmp_path)) == 2


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
    with killed_at(monkeypatch, number):
        replace_directory(fresh, target)
    assert text_of(target) in ("old", "new") or text_of(fresh) == "new"
    if not fresh.exists():
        directory("final.new", "new")
    replace_directory(fresh, target)
    assert text_of(target) == "new" and not fresh.exists() and not aside.exists()


def test_the_same_step_again_takes_the_place_of_the_first(tmp_path: Path) -> None:
    write(tmp_path, 2, "old")
    assert (write(tmp_path, 2, "new") / "actor" / RANK).read_text() == "new"
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_2"]


def test_another_course_of_the_run_is_set_aside(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        write(tmp_path, step, text=f"first {step}")
    (tmp_path / "checkpoints" / "step_6" / MANIFEST).unlink()
    started(tmp_path, 8)
    set_aside_later(tmp_path, 2)
    assert steps(tmp_path) == [2]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["earlier", "step_2"]
    write(tmp_path, 3)
    remove_old(tmp_path, TrainerConfig(max_to_keep=1), -1)
    assert steps(tmp_path) == [3], "the new one is kept"
    assert resume(tmp_path) == tmp_path / "checkpoints" / "step_3"
    set_aside_later(tmp_path, 3)
    set_aside_later(tmp_path, 0)
    earlier = tmp_path / "checkpoints" / "earlier"
    moved = sorted(str(path.relative_to(earlier)) for path in earlier.glob("*/*"))
    assert moved == ["1/step_4", "1/step_6", "2/step_3"]
    assert (earlier / "1" / "step_6" / "actor" / RANK).read_text() == "first 6"
    assert run_checkpoints.read_progress(earlier / "1" / "step_4").step == 4


def test_space_is_counted_where_the_run_will_be(tmp_path: Path) -> None:
    assert lack_of_space(tmp_path / "not" / "yet", 1) is None
    said = lack_of_space(tmp_path / "not" / "yet", 2**60)
    assert said is not None and f"{2**60:,} bytes are needed and " in said and " are free on the disk of" in said
