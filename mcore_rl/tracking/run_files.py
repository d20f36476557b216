"""Reads a run from its files; it may have been killed, be still going, or have lost some of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from mcore_rl.ground.errors import ConfigError, Violation
from mcore_rl.ground.json_text import read_json
from mcore_rl.tracking.clock import TIMELINE, PhaseSpan, read_timeline
from mcore_rl.tracking.jsonl import read_metrics
from mcore_rl.tracking.lanes import LANES, StepLanes, read_lanes
from mcore_rl.tracking.metrics import PHASES, is_phase
from mcore_rl.tracking.samples import Kind, sample_files
from mcore_rl.tracking.verdict import Accuracy

NUMBER = (int, float)  # a union would be made anew for each of a million numbers
EVIDENCE = ("data_source", "prompt_id", "correct")


@dataclass(frozen=True)
class RecordedRun:
    """The files of a run.

    steps: lines of metrics.jsonl.  environment, config, plan, timeline, lanes: of environment.json, config.yaml,
    plan.json, timeline.jsonl and lanes.jsonl; {} or "" if the file is missing.
    """

    path: Path
    steps: tuple[dict[str, Any], ...]
    environment: dict[str, Any]
    config: str
    plan: dict[str, Any]
    timeline: dict[int, tuple[PhaseSpan, ...]]
    lanes: dict[int, StepLanes]

    @property
    def name(self) -> str:
        """Name of the run's directory."""
        return self.path.resolve().name

    @property
    def last_step(self) -> int | None:
        """The last recorded step; None if there is none."""
        return self.steps[-1]["step"] if self.steps else None

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run; None if environment.json lacks them."""
        steps = self.environment.get("total_steps")
        return steps if isinstance(steps, int) else None

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The values of config.yaml; {} where it cannot be read."""
        return parsed_config(self.config)

    @property
    def complete(self) -> bool:
        """Whether the last step of the run is recorded."""
        return self.last_step is not None and self.total_steps is not None and self.last_step >= self.total_steps

    def values(self, key: str) -> list[tuple[int, float | None]]:
        """(step, number) of the steps that report ``key``; None for a number that was not finite."""
        return [(row["step"], _number(row[key])) for row in self.steps if key in row]

    def numbers(self, key: str) -> list[tuple[int, float]]:
        """The finite numbers of ``key``, with their steps."""
        return [(step, value) for step, value in self.values(key) if value is not None]

    def metric_keys(self) -> list[str]:
        """Every metric that any step reports."""
        return [key for key in dict.fromkeys(chain.from_iterable(self.steps)) if key != "step"]

    def phases(self) -> list[str]:
        """The phases that took any time: in the order of ``PHASES``, then those of roles that a user's file brings."""
        timed = [key.removeprefix("time/") for key in self.metric_keys() if key.startswith("time/")]
        phases = [*PHASES, *(each for each in timed if each not in PHASES and is_phase(each))]
        return [phase for phase in phases if any(value for _, value in self.values(f"time/{phase}"))]

    @cached_property
    def accuracies(self) -> dict[str, list[Accuracy]]:
        """Data source -> its validations in the order of steps, from the parquet files."""
        validations: dict[str, list[Accuracy]] = defaultdict(list)
        for step in sample_files(self.path, "validation"):
            rights: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
            for row in self.samples(step, "validation", EVIDENCE):
                if row.get("correct") is not None:
                    source = str(row.get("data_source"))
                    prompt = str(row.get("prompt_id"))
                    rights[source][prompt].append(float(row["correct"]))
            for source, prompts in rights.items():
                means = {prompt: sum(right) / len(right) for prompt, right in prompts.items()}
                validations[source].append(Accuracy(step, means))
        return dict(sorted(validations.items()))

    def samples(self, step: int, kind: Kind, columns: tuple[str, ...] | None = None) -> list[dict[str, Any]]:
        """The rows of a step's samples, [] if they cannot be read; missing columns are left out."""
        path = self.path / kind / f"step_{step}.parquet"
        try:
            names = pq.read_schema(path).names
            wanted = None if columns is None else [name for name in columns if name in names]
            rows: list[dict[str, Any]] = pq.read_table(path, columns=wanted).to_pylist()
            return rows
        except (OSError, pa.ArrowException):
            return []


def read_run(path: Path | str) -> RecordedRun:
    """The run in the directory ``path``.  ConfigError: it holds no run."""
    path = Path(path)
    names = ("metrics.jsonl", "environment.json", "config.yaml")
    if not any((path / name).is_file() for name in names):
        problem = f"holds none of {', '.join(names)}"
        raise ConfigError([Violation("run_dir", path, problem, "Give trainer.default_local_dir of a run")])
    return RecordedRun(
        path,
        tuple(read_metrics(path / "metrics.jsonl")),
        _object(path / "environment.json"),
        _text(path / "config.yaml"),
        _object(path / "plan.json"),
        read_timeline(path / TIMELINE),
        read_lanes(path / LANES),
    )


def parsed_config(text: str) -> dict[str, Any]:
    """The values of a config.yaml; {} where ``text`` is none."""
    try:
        values = yaml.safe_load(text)
    except (ValueError, yaml.YAMLError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def setting(config: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key; None where there is none."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} if there is none."""
    try:
        value = read_json(_text(path))
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, NUMBER) else None
