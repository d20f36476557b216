"""Validation: samples every prompt of the validation files, grades the answers, and averages by data source."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from mcore_rl.controller.step.rollout_collection import CollectProgress, RolloutCollector
from mcore_rl.data.prompts import PromptSet
from mcore_rl.rollout.episodes import Episode


async def validate(
    collector: RolloutCollector, prompts: PromptSet, batch_size: int | None, progress: CollectProgress
) -> tuple[dict[str, float], list[Episode]]:
    """(``val/*`` metrics, their episodes).  batch_size: prompts sampled at a time; None is all."""
    count = len(prompts)
    episodes: list[Episode] = []
    size = count if batch_size is None else batch_size
    for start in range(0, count, size):
        rows = [prompts[index] for index in range(start, min(start + size, count))]
        episodes += await collector.collect_validation(
            rows,
            lambda done, of, start=start: progress(start + done, count),  # type: ignore[misc]
        )
    return validation_metrics(episodes), episodes


def validation_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Means over the episodes of each data source; accuracy only if its grader judges answers."""
    by_source: dict[str, list[Episode]] = defaultdict(list)
    for episode in episodes:
        if episode.part:  # of a user's program, which counts once
            continue
        by_source[episode.row.data_source].append(episode)
    metrics: dict[str, float] = {}
    for source, of_source in by_source.items():
        graded = [each for each in of_source if not each.lost]
        correct = [each.graded.correct for each in of_source if each.graded.correct is not None]
        if correct:
            metrics[f"val/{source}/accuracy"] = fmean(correct)
        metrics |= {
            f"val/{source}/reward": fmean(each.reward for each in graded) if graded else 0.0,
            f"val/{source}/response_length": fmean(each.num_response_tokens for each in of_source),
            f"val/{source}/clip_share": fmean(each.truncated for each in of_source),
            f"val/{source}/prompts": float(len({each.row.id for each in of_source})),
        }
        if len(graded) < len(of_source):
            metrics[f"val/{source}/lost"] = float(len(of_source) - len(graded))
    return metrics


def overall(metrics: dict[str, float]) -> float | None:
    """The number by which validations are compared: the mean accuracy over data sources, else the mean reward."""
    for name in ("accuracy", "reward"):
        values = [value for key, value in metrics.items() if key.startswith("val/") and key.endswith(f"/{name}")]
        if values:
            return fmean(values)
    return None
