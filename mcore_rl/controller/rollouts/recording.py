"""What a run writes down of each step's rollouts: the line of its ledger, and the rollouts themselves to the last bit.

``record/step_N.parquet`` holds what the trainer was given; ``replay`` gives it to a trainer again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mcore_rl.config.asynchrony import trains_stale
from mcore_rl.config.run import RunConfig
from mcore_rl.config.trainer import Mode
from mcore_rl.controller.rollouts.drawn_file import RowOf, read_drawn, write_drawn
from mcore_rl.controller.rollouts.kept_draws import batch_facts, batch_groups, batch_of
from mcore_rl.controller.step.rollout_collection import RolloutBatch
from mcore_rl.episodes import Episode
from mcore_rl.tracking.atomic import replaced
from mcore_rl.tracking.schedule import ScheduledDrop, ScheduledGroup, ScheduledStep

RECORD = "record"


def record_file(run_dir: Path, step: int) -> Path:
    """Of the rollouts of ``step``."""
    return run_dir / RECORD / f"step_{step}.parquet"


def write_record(run_dir: Path, step: int, batch: RolloutBatch, place: Mapping[str, Any]) -> None:
    """Writes the rollouts of ``step``.  place: the sampler's state after them.  OSError: the disk is full, or fails."""
    with replaced(record_file(run_dir, step)) as path:
        write_drawn(path, {"step": step, "place": dict(place), **batch_facts(batch)}, batch_groups(batch))


def read_record(run_dir: Path, step: int, row_of: RowOf) -> tuple[RolloutBatch, dict[str, Any]]:
    """(the rollouts of ``step``, the sampler's state after them).  DrawnFileError: they cannot be read."""
    facts, groups = read_drawn(record_file(run_dir, step), row_of)
    return batch_of(facts, groups), facts["place"]


class Recorder:
    """Writes records in a thread while the step goes on.  warn: is told if one cannot be written; the run goes on."""

    def __init__(self, run_dir: Path, *, warn: Callable[[str], None]) -> None:
        self._run_dir, self._warn = run_dir, warn
        self._writing: asyncio.Task[None] | None = None

    def begin(self, step: int, batch: RolloutBatch, place: Mapping[str, Any]) -> None:
        """Begins to write the rollouts of ``step``, which do not change any more."""
        self._writing = asyncio.create_task(asyncio.to_thread(write_record, self._run_dir, step, batch, place))

    async def end(self, step: int) -> None:
        """Waits until they are written: the checkpoint of ``step`` must find them."""
        writing, self._writing = self._writing, None
        if writing is not None:
            try:
                await writing
            except OSError as error:
                self._warn(f"The rollouts of step {step} are not recorded, so that no replay gets beyond it: {error}")

    async def close(self) -> None:
        """Waits for what is being written."""
        writing, self._writing = self._writing, None
        if writing is not None:
            await asyncio.wait([writing])


def scheduled_step(
    config: RunConfig,
    step: int,
    batch: RolloutBatch,
    place: Mapping[str, Any],
    trained: Sequence[int],
    updates: Mapping[str, int],
    settings: str,
) -> ScheduledStep:
    """The line of ``step`` in schedule.jsonl.

    place: the sampler's state after its rollouts.  trained: tokens of each episode that are in the loss.
    updates: optimizer steps of each role.  settings: see ``ScheduledStep``.
    """
    groups: dict[int, list[tuple[Episode, int]]] = {}
    for episode, count in zip(batch.episodes, trained, strict=True):
        groups.setdefault(episode.group, []).append((episode, count))
    mode = config.trainer.mode
    bound = 0 if not trains_stale(config) else 1 if mode is Mode.one_step_off else config.async_.max_staleness
    return ScheduledStep(
        step=step,
        version=step - 1,
        mode=mode.value,
        batch=config.data.train_batch_size,
        bound=bound,
        num_prompts=place["num_prompts"],
        groups=[_group(each) for _, each in sorted(groups.items())],
        dropped=[
            ScheduledDrop(id=each.id, number=each.number, epoch=each.epoch, reason=each.reason)
            for each in batch.dropped
        ],
        epoch=place["epoch"],
        position=place["position"],
        again=[(epoch, number) for epoch, number in place["again"]],
        updates=dict(updates),
        settings=settings,
    )


def _group(members: list[tuple[Episode, int]]) -> ScheduledGroup:
    row = members[0][0].row
    spans = [span for each, _ in members for part in each.segments if part.trained for span in part.versions]
    versions = [span.version for span in spans if span.end > span.start]
    return ScheduledGroup(
        id=row.id,
        number=row.number,
        epoch=row.epoch,
        oldest=min(versions, default=None),
        newest=max(versions, default=None),
        samples=len(members),
        lost=sum(each.lost for each, _ in members),
        trained=sum(count > 0 for _, count in members),
    )
