"""What a run whose drawing is ahead of its training writes down, for tests of ``trainer.mode``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

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
