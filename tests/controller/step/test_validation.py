"""Validation counted by hand: by data source, in batches, and one number to compare by."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from mcore_rl.controller.step.validation import overall, validate, validation_metrics
from mcore_rl.data.prompts import PromptRow
from mcore_rl.rewards.score import Score
from mcore_rl.rollout.episodes import Episode
from mcore_rl.tracking.metrics import metric_of
from tests.support.scripted_rollout import answered, lost_episode, row


def episode(
    number: int, source: str, value: float, length: int = 2, cut: bool = False, correct: float | None = None
) -> Episode:
    return answered(number, Score(value, correct=correct), response=(7,) * length, source=source, cut=cut)


FOUND = [
    episode(0, "sums", 1.0, 4, correct=1.0),
    episode(0, "sums", 0.5, 6, cut=True, correct=0.0),
    episode(1, "sums", 0.0, 5, correct=0.0),
    episode(2, "essays", 3.0),
    episode(3, "essays", 4.0, correct=1.0),
]


def test_means_over_the_samples_of_each_data_source() -> None:
    metrics = validation_metrics(FOUND)
    assert metrics == pytest.approx(
        {
            "val/sums/accuracy": 1 / 3, "val/sums/reward": 0.5, "val/sums/response_length": 5.0,
            "val/sums/clip_share": 1 / 3, "val/sums/prompts": 2.0,
            "val/essays/accuracy": 1.0, "val/essays/reward": 3.5, "val/essays/response_length": 2.0,
            "val/essays/clip_share": 0.0, "val/essays/prompts": 2.0,
        }
    )  # fmt: skip
    for key in metrics:
        metric_of(key)


def test_lost_episodes_are_counted_and_in_no_mean() -> None:
    metrics = validation_metrics([episode(0, "sums", 1.0, correct=1.0), lost_episode(1, Score(0.0))])
    assert (metrics["val/sums/accuracy"], metrics["val/sums/reward"], metrics["val/sums/lost"]) == (1.0, 1.0, 1.0)
    assert all(metric_of(key) for key in metrics)
    assert validation_metrics([lost_episode(1, Score(0.0))])["val/sums/reward"] == 0.0


def test_one_number_is_the_mean_over_data_sources() -> None:
    assert overall(validation_metrics(FOUND)) == pytest.approx(2 / 3)
    assert overall(validation_metrics([episode(0, "a", 2.0), episode(1, "b", 5.0)])) == 3.5
    assert overall({"reward/mean": 3.0}) is None


@pytest.mark.parametrize(("size", "batches"), [(None, [5]), (2, [2, 2, 1]), (5, [5]), (9, [5])])
def test_prompts_are_drawn_so_many_at_a_time(size: int | None, batches: list[int]) -> None:
    drawn: list[list[str]] = []

    class RolloutCollector:
        async def collect_validation(self, rows: Sequence[PromptRow], progress) -> list[Episode]:  # type: ignore[no-untyped-def]
            drawn.append([each.id for each in rows])
            progress(1, len(rows))
            return [episode(number, "sums", 1.0) for number in range(len(rows))]

    told: list[tuple[int, int]] = []
    prompts = [row(number) for number in range(5)]
    result = asyncio.run(validate(RolloutCollector(), prompts, size, lambda done, of: told.append((done, of))))  # type: ignore[arg-type]
    assert [len(each) for each in drawn] == batches
    assert [name for each in drawn for name in each] == [each.id for each in prompts]
    assert len(result[1]) == 5
    assert told == [(1 + sum(batches[:number]), 5) for number in range(len(batches))]
