"""Validation: every prompt of the validation files, drawn as validation draws, graded, and counted by data source."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from mcore_rl.controller.step.batch_assembly import Trajectory
from mcore_rl.controller.step.rollout_collection import Report, RolloutCollector
from mcore_rl.data.prompts import PromptSet


async def validate(
    drawing: RolloutCollector, prompts: PromptSet, batch_size: int | None, report: Report
) -> tuple[dict[str, float], list[Trajectory]]:
    """``val/*`` metrics, and what they are of.  batch_size: prompts drawn at a time; None is all of them."""
    count = len(prompts)
    found: list[Trajectory] = []
    size = count if batch_size is None else batch_size
    for start in range(0, count, size):
        rows = [prompts[index] for index in range(start, min(start + size, count))]
        found += await drawing.validation(rows, lambda done, of, start=start: report(start + done, count))  # type: ignore[misc]
    return validation_metrics(found), found


def validation_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Means over the samples of each data source; accuracy where its grader knows it."""
    by_source: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        by_source[trajectory.row.data_source].append(trajectory)
    metrics: dict[str, float] = {}
    for source, found in by_source.items():
        correct = [each.score.correct for each in found if each.score.correct is not None]
        if correct:
            metrics[f"val/{source}/accuracy"] = fmean(correct)
        metrics |= {
            f"val/{source}/reward": fmean(each.score.value for each in found),
            f"val/{source}/response_length": fmean(len(each.sample.tokens) for each in found),
            f"val/{source}/clip_share": fmean(each.truncated for each in found),
            f"val/{source}/prompts": float(len({each.row.id for each in found})),
        }
    return metrics


def overall(metrics: dict[str, float]) -> float | None:
    """One number to compare validations by: the mean accuracy over data sources, or reward where there is none."""
    for name in ("accuracy", "reward"):
        found = [value for key, value in metrics.items() if key.startswith("val/") and key.endswith(f"/{name}")]
        if found:
            return fmean(found)
    return None
