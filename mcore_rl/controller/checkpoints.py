"""Checkpoints of a run: ``checkpoints/step_N``, whole under that name or not there.

A checkpoint is every rank's state of every role, and ``controller.json``: the step, the place in the data, the KL
controller, the best validation.  What is being written is ``step_N.incomplete``, and is never resumed from.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mcore_rl.config.trainer import ResumeMode, TrainerConfig
from mcore_rl.errors import CheckpointError, ConfigError, Violation
from mcore_rl.runtime.worker_group import WorkerGroup
from mcore_rl.tracking.run_directory import set_aside

STEP = re.compile(r"step_(\d+)")
STATE = "controller.json"


@dataclass(kw_only=True)
class Progress:
    """How far a run is.  step: of the last that is complete.  best, best_step: of validation; -1 is before step 1."""

    step: int = 0
    sampler: dict[str, Any] = field(default_factory=dict)
    kl: dict[str, float] = field(default_factory=dict)
    best: float | None = None
    best_step: int = -1


def complete_checkpoints(run_dir: Path) -> list[Path]:
    """Oldest first."""
    found = [
        (int(match[1]), path)
        for path in (run_dir / "checkpoints").glob("step_*")
        if (match := STEP.fullmatch(path.name)) and (path / STATE).is_file()
    ]
    return [path for _, path in sorted(found)]


def how_to_go_on(run_dir: Path) -> str:
    """One sentence for who has stopped the run."""
    found = complete_checkpoints(run_dir)
    if not found:
        return "There is no checkpoint yet."
    return f"{found[-1]} is complete: the same command goes on from there (trainer.resume_mode=auto)."


def to_resume(trainer: TrainerConfig) -> Path | None:
    """The checkpoint that ``trainer`` says to go on from; None is a fresh run.

    ConfigError: ``resume_from_path`` is no complete checkpoint.
    """
    if trainer.resume_mode is ResumeMode.off:
        return None
    if trainer.resume_mode is ResumeMode.auto:
        found = complete_checkpoints(Path(trainer.default_local_dir))
        return found[-1] if found else None
    assert trainer.resume_from_path is not None
    path = Path(trainer.resume_from_path)
    if not (path / STATE).is_file():
        problem = "is no complete checkpoint: there is no controller.json in it"
        remedy = "Give a directory such as RUN/checkpoints/step_100, or write trainer.resume_mode=auto"
        raise ConfigError([Violation("trainer.resume_from_path", path, problem, remedy)])
    return path


def read_progress(checkpoint: Path) -> Progress:
    """What ``finish`` wrote.  CheckpointError: it cannot be read."""
    try:
        return Progress(**json.loads((checkpoint / STATE).read_text()))
    except (OSError, ValueError, TypeError) as error:
        problem = f"{STATE} cannot be read: {error}. Resume from another step"
        raise CheckpointError(str(checkpoint), [problem]) from error


def begin(run_dir: Path, step: int, roles: list[str]) -> Path:
    """An empty directory for a checkpoint of ``step``, with one for each role."""
    path = run_dir / "checkpoints" / f"step_{step}.incomplete"
    shutil.rmtree(path, ignore_errors=True)  # of a run that was killed while it wrote
    for role in roles:
        (path / role).mkdir(parents=True)
    return path


def finish(incomplete: Path, progress: Progress, max_to_keep: int | None) -> Path:
    """Give the checkpoint its name, and remove those that are too many."""
    (incomplete / STATE).write_text(json.dumps(asdict(progress), indent=2))
    path = incomplete.with_suffix("")
    _remove(path)  # the same step again
    incomplete.rename(path)
    if max_to_keep is not None:
        for old in complete_checkpoints(incomplete.parents[1])[:-max_to_keep]:
            _remove(old)
    return path


def set_aside_later(run_dir: Path, step: int) -> None:
    """Checkpoints of steps after ``step``, where the run goes on, to ``checkpoints/earlier/N``.

    They are of another course of the run: the next resume must not find them newest, nor ``max_to_keep`` keep them.
    """
    later = [path for path in complete_checkpoints(run_dir) if int(path.name.removeprefix("step_")) > step]
    set_aside(later, run_dir / "checkpoints")


def _remove(checkpoint: Path) -> None:
    """What is removed half-way is no complete checkpoint either."""
    (checkpoint / STATE).unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)


def replace_directory(fresh: Path, target: Path) -> None:
    """``target`` becomes ``fresh``; at every moment one of the two is whole."""
    aside = target.with_name(target.name + ".old")
    shutil.rmtree(aside, ignore_errors=True)
    if target.exists():
        target.rename(aside)
    fresh.rename(target)
    shutil.rmtree(aside, ignore_errors=True)


async def export_hf(group: WorkerGroup, source: Path, target: Path) -> None:
    """The weights of ``group`` as a Hugging Face checkpoint in ``target``, with the companions of ``source``."""
    fresh = target.with_name(f"{target.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)  # of a run that was killed while it wrote
    await group.all("save_hf", fresh, source)
    replace_directory(fresh, target)
