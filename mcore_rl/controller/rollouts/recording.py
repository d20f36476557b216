"""What a run writes down of each step's rollouts: the line of its ledger, and the rollouts themselves to the last bit.

``record/step_N.parquet`` holds what the trainer was given; with ``trainer.replay`` a trainer is given it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from mcore_rl.config.asynchrony import trains_stale
from mcore_rl.config.run import RunConfig
from mcore_rl.config.trainer import Mode
from mcore_rl.controller.rollouts.drawn_file import DrawnFileError, RowOf, read_drawn, write_drawn
from mcore_rl.controller.rollouts.kept_draws import KeptDraws, batch_facts, batch_groups, batch_of
from mcore_rl.controller.step.preemption import Preemption
from mcore_rl.controller.step.rollout_collection import RolloutBatch
from mcore_rl.data.sampler import PromptSampler
from mcore_rl.ground.errors import CheckpointError
from mcore_rl.rollout.episodes import Episode
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


MAX_UNSENT = 4  # records that are kept because the disk is full; each holds the rollouts of a step


class Recorder:
    """Writes records in a thread while the step goes on.  warn: is told if one cannot be written; the run goes on.

    One that does not fit on the disk is written with the next.
    """

    def __init__(self, run_dir: Path, *, warn: Callable[[str], None]) -> None:
        self._run_dir = run_dir
        self._warn = warn
        self._writing: asyncio.Task[None] | None = None
        self._unsent = list[tuple[int, RolloutBatch, Mapping[str, Any]]]()

    def begin(self, step: int, batch: RolloutBatch, place: Mapping[str, Any]) -> None:
        """Begins to write the rollouts of ``step``, which do not change any more."""
        self._unsent = [*self._unsent, (step, batch, place)][-MAX_UNSENT:]
        self._writing = asyncio.create_task(asyncio.to_thread(self._send))

    async def end(self, step: int) -> None:
        """Waits until they are written: the checkpoint of ``step`` must find them."""
        writing = self._writing
        self._writing = None
        if writing is not None:
            try:
                await writing
            except OSError as error:
                first = self._unsent[0][0]
                said = f"The rollouts of step {first} are not recorded, so that no replay gets beyond it: {error}"
                self._warn(f"{said}. The next step tries again")

    async def close(self) -> None:
        """Waits for what is being written."""
        writing = self._writing
        self._writing = None
        if writing is not None:
            await asyncio.wait([writing])
        if self._unsent:
            try:
                await asyncio.to_thread(self._send)
            except OSError as error:
                steps = ", ".join(str(step) for step, _, _ in self._unsent)
                self._warn(f"The rollouts of steps {steps} are not recorded: {error}")

    def _send(self) -> None:
        """Writes what is unsent, in the order of steps.  OSError: the disk is full, or fails."""
        while self._unsent:
            write_record(self._run_dir, *self._unsent[0])
            self._unsent = self._unsent[1:]


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


class ReplaySource:
    """The recorded rollouts of one step after the other, as ``RolloutSource``.

    recorded: the run directory that has them.  row_of: the prompts of the training files.
    sampler: is moved to the place in the data that the other run had after each step.
    """

    def __init__(self, recorded: Path, row_of: RowOf, sampler: PromptSampler) -> None:
        self._recorded = recorded
        self._row_of = row_of
        self._sampler = sampler

    async def __aenter__(self) -> ReplaySource:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    @property
    def place(self) -> dict[str, Any]:
        """The sampler's state after the last step's rollouts."""
        return self._sampler.state_dict()

    @property
    def kept(self) -> KeptDraws:
        """Nothing but the place: what is recorded need not be kept."""
        return KeptDraws(place=self.place)

    def return_to(self, kept: KeptDraws) -> None:
        """Goes back to ``kept``."""
        self._sampler.load_state_dict(kept.place)

    def resume(self, kept: KeptDraws, version: int) -> None:
        """Does nothing: rollouts come from the record."""

    async def next(self, step: int) -> RolloutBatch:
        """The rollouts of ``step``.  CheckpointError: they cannot be read."""
        try:
            batch, place = await asyncio.to_thread(read_record, self._recorded, step, self._row_of)
        except DrawnFileError as error:
            path = record_file(self._recorded, step).relative_to(self._recorded)
            remedy = "Restore it; steps before it were replayed, and their last checkpoint stays"
            raise CheckpointError(str(self._recorded / RECORD), [f"{path.name} {error}. {remedy}"]) from error
        self._sampler.load_state_dict(place)
        return batch

    async def take_back(self) -> None:
        """Nothing is drawn."""

    async def settle(self, preemption: Preemption) -> None:
        """Nothing is drawn."""
