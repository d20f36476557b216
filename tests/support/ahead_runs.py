"""What a run whose drawing is ahead of its training writes down, for tests of ``trainer.mode``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tests.support.crash_runs import bits_of
from tests.support.run_task import SPEED

APART = ("trainer.placement=separate", "trainer.n_gpus_per_node=1", "actor.parallel.ep=1")


def lines(directory: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl of steps."""
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["step"] > 0]


def staleness(rows: Sequence[dict[str, Any]]) -> list[tuple[float, float]]:
    """(mean, most) of every step."""
    return [(row["rollout/staleness_mean"], row["rollout/staleness_max"]) for row in rows]


def prompts(directory: Path, steps: int) -> list[str]:
    """Of every step, each once."""
    drawn: list[str] = []
    for step in range(1, steps + 1):
        rows = pq.read_table(directory / "rollouts" / f"step_{step}.parquet").to_pylist()
        drawn += [row["prompt_id"] for row in rows if row["sample"] == 0]
    return drawn


def versions(directory: Path, step: int) -> set[int]:
    """Of the weights that drew the samples of ``step``."""
    return {*pq.read_table(directory / "rollouts" / f"step_{step}.parquet")["version"].to_pylist()}


def same_training(first: Path, second: Path, steps: int) -> None:
    """Asserts that two runs trained alike to the last bit: weights, optimizer, samples, and metrics but for times."""
    one, other = bits_of(first, steps), bits_of(second, steps)
    assert one.states == other.states and len(one.states) > 1
    assert one.rollouts == other.rollouts
    for row, again in zip(lines(first), lines(second), strict=True):
        of_time = {key for key in row.keys() | again.keys() if key.startswith(SPEED) or key.endswith("_s")}
        assert {key: row.get(key) for key in row.keys() - of_time} == {
            key: again.get(key) for key in again.keys() - of_time
        }
