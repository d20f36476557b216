"""Checkpoints of a run: ``checkpoints/step_N``, which is complete if it has this name.

A checkpoint is every rank's state of every role (``training/run_state.py``), and ``controller.json``: the step, the
place in the data, the KL controller, the best validation.  While it is being written it is ``step_N.incomplete``, from
which no run resumes.  A manifest lists the files of a checkpoint, so that later damage is noticed and named.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mcore_rl.checkpoints.manifest import MANIFEST, FileSum, damage, write_manifest
from mcore_rl.checkpoints.new_directory import wait_for_disk
from mcore_rl.config.trainer import ResumeMode, TrainerConfig
from mcore_rl.ground.errors import CheckpointError, ConfigError, Violation
from mcore_rl.ground.json_text import read_json
from mcore_rl.runtime.train_group import TrainGroup
from mcore_rl.tracking.atomic import replaced
from mcore_rl.tracking.run_directory import set_aside

STEP = re.compile(r"step_(\d+)")
INCOMPLETE = ".incomplete"
STATE = "controller.json"


@dataclass(kw_only=True)
class Progress:
    """How far a run is.

    step: the last complete step.
    sampler: the place in the data.
    kl: the state of the KL controller.
    best, best_step: the best validation and its step; None and -1 before the first validation.
    """

    step: int = 0
    sampler: dict[str, Any] = field(default_factory=dict)
    kl: dict[str, float] = field(default_factory=dict)
    best: float | None = None
    best_step: int = -1


def complete_checkpoints(run_dir: Path) -> list[Path]:
    """The checkpoints that were finished, oldest first; they are not checked for damage."""
    return [path for path in _named(run_dir) if (path / MANIFEST).is_file()]


def how_to_go_on(run_dir: Path) -> str:
    """One sentence for the user who stopped the run: how to continue it."""
    checkpoints = complete_checkpoints(run_dir)
    if not checkpoints:
        return "There is no checkpoint yet."
    return f"{checkpoints[-1]} is complete: the same command goes on from there (trainer.resume_mode=auto)."


def to_resume(trainer: TrainerConfig, warn: Callable[[str], None]) -> Path | None:
    """The checkpoint from which ``trainer`` says to resume, with every byte checked; None: a fresh run.

    ``auto`` takes the newest undamaged one; ``warn`` receives a message about those that were skipped, and why.

    ConfigError: ``resume_from_path`` is no undamaged checkpoint.  CheckpointError, with the damage of each: there are
    checkpoints, and all are damaged.
    """
    if trainer.resume_mode is ResumeMode.off:
        return None
    if trainer.resume_mode is ResumeMode.path:
        assert trainer.resume_from_path is not None
        path = Path(trainer.resume_from_path)
        if problems := damage(path):
            problem = "is no sound checkpoint: " + "; ".join(problems)
            remedy = "Give a directory such as RUN/checkpoints/step_100, or write trainer.resume_mode=auto"
            raise ConfigError([Violation("trainer.resume_from_path", path, problem, remedy)])
        return path
    run_dir = Path(trainer.default_local_dir)
    begun = sorted((run_dir / "checkpoints").glob(f"step_*{INCOMPLETE}"))
    passed = [f"{path.name}: it was being written when the run ended" for path in begun]
    damaged = list[str]()
    for path in reversed(_named(run_dir)):
        problems = damage(path)
        if not problems:
            if passed + damaged:
                warn("\n  - ".join([f"Resuming from {path.name}. Passed over:", *damaged, *passed]))
            return path
        damaged += [f"{path.name}: {problem}" for problem in problems]
    if damaged:
        remedy = "No checkpoint is sound. Restore one, or begin anew with trainer.resume_mode=off"
        raise CheckpointError(str(run_dir / "checkpoints"), [*damaged, remedy])
    if passed:
        warn("\n  - ".join(["There is no checkpoint to resume from; the run begins anew. Passed over:", *passed]))
    return None


def read_progress(checkpoint: Path) -> Progress:
    """The progress that ``begin`` wrote.  CheckpointError: it cannot be read."""
    try:
        return Progress(**read_json((checkpoint / STATE).read_text()))
    except (OSError, ValueError, TypeError) as error:
        problem = f"{STATE} cannot be read: {error}. Resume from another step"
        raise CheckpointError(str(checkpoint), [problem]) from error


def begin(
    run_dir: Path, progress: Progress, roles: Collection[str], keep: Callable[[Path], None] = lambda path: None
) -> Path:
    """Makes the directory of a checkpoint of ``progress``, with an empty directory for each role; returns its path.

    keep: writes further files into it.  OSError: the disk is full, or fails; nothing is left then.
    """
    path = run_dir / "checkpoints" / f"step_{progress.step}{INCOMPLETE}"
    shutil.rmtree(path, ignore_errors=True)  # left by a run that was killed while it wrote
    try:
        for role in roles:
            (path / role).mkdir(parents=True)
        (path / STATE).write_text(json.dumps(asdict(progress), indent=2))
        keep(path)
    except OSError:
        shutil.rmtree(path, ignore_errors=True)
        raise
    return path


def finish(incomplete: Path, sums: Mapping[str, FileSum]) -> Path:
    """Completes a checkpoint whose files are all on the disk: writes its manifest and gives it its name.

    sums: of the files that the ranks wrote.  Returns its path.  OSError: the disk is full, or fails.
    """
    write_manifest(incomplete, sums)
    path = incomplete.with_suffix("")
    replace_directory(incomplete, path)
    wait_for_disk(path.parent)
    return path


def remove_old(run_dir: Path, trainer: TrainerConfig, best_step: int) -> None:
    """Removes checkpoints, except the newest ``max_to_keep``, those whose step ``keep_every`` divides, and the best."""
    checkpoints = complete_checkpoints(run_dir)
    for path in [] if trainer.max_to_keep is None else checkpoints[: -trainer.max_to_keep]:
        step = _step(path)
        if step != best_step and (trainer.keep_every is None or step % trainer.keep_every):
            _remove(path)


def lack_of_space(run_dir: Path, num_bytes: int) -> str | None:
    """Why ``num_bytes`` cannot be written, in words; None if they fit."""
    free = shutil.disk_usage(next(place for place in (run_dir, *run_dir.parents) if place.exists())).free
    if num_bytes <= free:
        return None
    return f"{num_bytes:,} bytes are needed and {free:,} are free on the disk of {run_dir}"


def set_aside_later(run_dir: Path, step: int) -> None:
    """Moves checkpoints of steps after ``step``, from which the run resumes, to ``checkpoints/earlier/N``.

    They belong to an abandoned continuation of the run: the next resume must not take them as the newest, and
    ``max_to_keep`` must not count them.  Incomplete checkpoints are removed.
    """
    set_aside([path for path in _named(run_dir) if _step(path) > step], run_dir / "checkpoints")
    for path in (run_dir / "checkpoints").glob(f"step_*{INCOMPLETE}"):
        shutil.rmtree(path, ignore_errors=True)


def _named(run_dir: Path) -> list[Path]:
    """The directories that have the name of a checkpoint, oldest first."""
    paths = [path for path in (run_dir / "checkpoints").glob("step_*") if STEP.fullmatch(path.name)]
    return sorted(paths, key=_step)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _remove(checkpoint: Path) -> None:
    """Removes a checkpoint; renames it first, so that a half-removed one counts neither as complete nor as damaged."""
    shutil.rmtree(gone := checkpoint.with_name(checkpoint.name + INCOMPLETE), ignore_errors=True)
    checkpoint.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def replace_directory(fresh: Path, target: Path) -> None:
    """Replaces ``target`` by ``fresh``; at every moment one of the two is complete on the disk."""
    aside = target.with_name(target.name + ".old")
    shutil.rmtree(aside, ignore_errors=True)
    if target.exists():
        target.rename(aside)
    fresh.rename(target)
    shutil.rmtree(aside, ignore_errors=True)


@dataclass(frozen=True)
class Exported:
    """An export's step, and when it was written: a run that restarts comes to a step twice."""

    step: int
    written_ns: int


async def export_hf(group: TrainGroup, source: Path, target: Path, step: int) -> None:
    """Writes the weights of ``group`` to ``target`` as a Hugging Face checkpoint, with ``source``'s sidecar files.

    step: of the weights; ``exported`` reads it.
    """
    fresh = target.with_name(f"{target.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)  # left by a run that was killed while it wrote
    await group.save_hf(fresh, source)
    publish_export(fresh, target, step)


def publish_export(fresh: Path, target: Path, step: int) -> None:
    """Replaces ``target`` by ``fresh``, which is of ``step``; in between, the step of ``target`` is unknown."""
    note = _step_of(target)
    note.unlink(missing_ok=True)
    replace_directory(fresh, target)
    with replaced(note) as new:
        new.write_text(f"{step}\n")


def exported(target: Path) -> Exported | None:
    """The step of the weights in ``target``; None where there is no export, or nobody noted its step."""
    note = _step_of(target)
    try:
        return Exported(int(note.read_text()), note.stat().st_mtime_ns) if target.is_dir() else None
    except (OSError, ValueError):
        return None


def _step_of(target: Path) -> Path:
    return target.with_name(f"{target.name}.step")  # beside it: an export has the files of a model alone
