"""Writes checkpoints while the run goes on: a step only waits for a copy to host memory.

At most one checkpoint is being written.  The next save and the end of the run wait for it.  If a save fails (the disk
is full, or fails), the run goes on and keeps its last good checkpoint; the failure is shown, counted, and the save is
tried again after the next step.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from mcore_rl.checkpoints.manifest import FileSum
from mcore_rl.checkpoints.state_writer import Written
from mcore_rl.config.trainer import TrainerConfig
from mcore_rl.controller.lifecycle import run_checkpoints
from mcore_rl.controller.lifecycle.messages import note
from mcore_rl.controller.lifecycle.run_checkpoints import Progress
from mcore_rl.ground.errors import CheckpointError, McoreRLError
from mcore_rl.runtime.train_group import TrainGroup

FIRST_LOOK_S, LOOK_S = 0.02, 1.0  # the first, and the longest, pause between questions whether workers have written
LEAVE_S = 60.0  # how long a failed run waits for a checkpoint being written: a worker that hangs never answers
MARGIN_BYTES = 16 << 20  # free space for headers, tokenizer and the controller's files
# Writes more files into the directory of a checkpoint, in a thread, and returns their bytes; raises OSError.
WriteMore = Callable[[Path], int]


def write_nothing(directory: Path) -> int:
    """A ``WriteMore`` that has nothing to write."""
    return 0


class Saver:
    """Writes the checkpoints of a run in ``directory``.

    groups: the workers of each role.
    trainer: the settings of saving.
    keep: writes further files into a checkpoint.
    warn: receives a message about each failure.
    saved_step: the step of the last complete checkpoint.
    """

    def __init__(
        self,
        directory: Path,
        groups: Sequence[TrainGroup],
        trainer: TrainerConfig,
        saved_step: int,
        *,
        keep: Callable[[Path], None],
        warn: Callable[[str], None],
    ) -> None:
        self._directory = directory
        self._groups = list(groups)
        self._trainer = trainer
        self._keep = keep
        self._warn = warn
        self.saved_step = saved_step
        self._writing: asyncio.Task[None] | None = None
        self._problem: str | None = None  # why the last save failed
        self._metrics: dict[str, float] = {}
        self._num_bytes = 0  # of the last checkpoint, all ranks; 0 before the first

    def move_to(self, directory: Path) -> None:
        """Writes to another run directory from now on, which has no checkpoint yet."""
        self._directory = directory
        self.saved_step = -1

    @property
    def failed(self) -> bool:
        """True if the last save failed and will be retried."""
        return self._problem is not None

    def metrics(self) -> dict[str, float]:
        """The metrics of saves that succeeded or failed since the last call."""
        metrics = self._metrics
        self._metrics = {}
        return metrics

    async def save(self, progress: Progress, more: WriteMore = write_nothing) -> None:
        """Saves a checkpoint of ``progress``, which may change once this returns.

        more: is called while the workers write; what it writes does not change meanwhile.
        Returns when the state is copied to host memory, with ``trainer.async_save``, else when the checkpoint is
        complete.  WorkerError: a worker died.
        """
        await self.settle()
        started = time.perf_counter()
        step = progress.step
        best_step = progress.best_step
        try:
            incomplete = await self._begin(progress)
        except OSError as error:
            self._fail(step, str(error))
            return
        for group in self._groups:
            await group.save_state(incomplete / group.role, behind=self._trainer.async_save)
        self._writing = asyncio.create_task(self._complete(incomplete, step, best_step, started, more))
        if not self._trainer.async_save:
            await self.settle()

    async def settle(self) -> None:
        """Waits until no checkpoint is being written."""
        writing = self._writing
        self._writing = None
        if writing is not None:
            await writing

    async def conclude(self, progress: Progress, more: WriteMore = write_nothing) -> None:
        """Makes sure, at the end of the run, that there is a checkpoint of ``progress``.

        CheckpointError: it could not be written, even at the second attempt.
        """
        await self.settle()
        for _ in range(2):
            if self.saved_step != progress.step:
                await self.save(progress, more)
                await self.settle()
        if self._problem is not None and self.saved_step != progress.step:
            remedy = run_checkpoints.how_to_go_on(self._directory)
            raise CheckpointError(str(self._directory / "checkpoints"), [f"{self._problem}. {remedy}"])

    async def close(self) -> None:
        """Called when the run ends for any reason: waits a while for a checkpoint that is being written."""
        try:
            await asyncio.wait_for(self.settle(), LEAVE_S)
        except (McoreRLError, TimeoutError) as error:
            self._warn(f"The checkpoint that was being written is lost: {str(error) or 'the workers do not answer'}")

    async def _begin(self, progress: Progress) -> Path:
        if self._num_bytes == 0:
            self._num_bytes = sum([await group.num_state_bytes() for group in self._groups])
        if lack := run_checkpoints.lack_of_space(self._directory, self._num_bytes + MARGIN_BYTES):
            raise OSError(lack)
        return run_checkpoints.begin(self._directory, progress, [group.role for group in self._groups], self._keep)

    async def _complete(self, incomplete: Path, step: int, best_step: int, started: float, more: WriteMore) -> None:
        sums = dict[str, FileSum]()
        problems = list[str]()
        more_bytes = 0
        try:
            more_bytes = await asyncio.to_thread(more, incomplete)
        except OSError as error:
            problems.append(f"rollouts cannot be written into {incomplete}: {error}")
        for group in self._groups:
            for rank, written in enumerate(await _written(group)):
                if written.sum is not None:
                    sums[f"{group.role}/{written.name}"] = written.sum
                else:
                    problems.append(f"{group.title(rank)} on {group.hosts[rank]}: {written.problem}")
        if not problems:
            try:
                await asyncio.to_thread(run_checkpoints.finish, incomplete, sums)
            except OSError as error:
                problems.append(f"{incomplete} cannot be finished: {error}")
        if problems:
            await asyncio.to_thread(shutil.rmtree, incomplete, ignore_errors=True)  # frees its space on the disk
            self._fail(step, "; ".join(problems))
            return
        self.saved_step = step
        self._problem = None
        self._metrics["perf/checkpoint_s"] = time.perf_counter() - started
        self._num_bytes = more_bytes + sum(each.num_bytes for each in sums.values())
        self._metrics["perf/checkpoint_gib"] = self._num_bytes / 2**30
        await asyncio.to_thread(run_checkpoints.remove_old, self._directory, self._trainer, best_step)

    def _fail(self, step: int, problem: str) -> None:
        self._problem = f"no checkpoint of step {step} was written: {problem}"
        key = "perf/failed_saves"
        self._metrics[key] = self._metrics.get(key, 0) + 1
        last = complete[-1].name if (complete := run_checkpoints.complete_checkpoints(self._directory)) else "none"
        self._warn(f"{self._problem}\nThe last good one is {last}; it is tried again after the next step.")


async def load_state(group: TrainGroup, checkpoint: Path) -> None:
    """Loads the role's state from ``checkpoint`` into ``group``'s workers; shows a note if bits may differ then."""
    if not await group.load_state(checkpoint / group.role):
        said = f"{group.role}: {checkpoint} was written in another layout. Weights and optimizer are the same"
        note(f"{said}; sums are now taken in another order, with other random numbers, so that bits may differ")


async def _written(group: TrainGroup) -> list[Written]:
    """Waits until all ranks have written their files; returns the outcomes.  It polls, so other calls do not wait."""
    wait = FIRST_LOOK_S
    while True:
        outcomes = await group.saved()
        done = [written for written in outcomes if written is not None]
        if len(done) == len(outcomes):
            return done
        await asyncio.sleep(wait)
        wait = min(2 * wait, LOOK_S)
