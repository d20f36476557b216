"""What every trainer has while it runs, and the loop that all of them go through; a trainer adds what differs.

``train`` has engines, rollouts and a policy (``controller/run.py``), ``sft`` one role and a batch of conversations
(``programs/sft.py``).  A third one writes its roles, what it prepares, and a step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from mcore_rl.config.compose import as_dict
from mcore_rl.config.run import RunConfig
from mcore_rl.config.sft import SftConfig
from mcore_rl.config.trainer import is_due
from mcore_rl.controller.lifecycle import run_checkpoints
from mcore_rl.controller.lifecycle.messages import warn
from mcore_rl.controller.lifecycle.preemption import Preempted, Preemption
from mcore_rl.controller.lifecycle.preparation import PreparedRun
from mcore_rl.controller.lifecycle.run_checkpoints import Progress
from mcore_rl.controller.lifecycle.saving import Saver
from mcore_rl.controller.lifecycle.start_plan import write_plan
from mcore_rl.controller.step.profiling import profiled
from mcore_rl.controller.step.utilization import device_peak, utilization
from mcore_rl.parallel.device import Platform
from mcore_rl.planning.plan import Plan
from mcore_rl.runtime.cluster import ray_cluster
from mcore_rl.runtime.train_group import TrainGroup
from mcore_rl.tracking.clock import Clock
from mcore_rl.tracking.sinks import Tracker

C = TypeVar("C", RunConfig, SftConfig)
P = TypeVar("P", bound=PreparedRun)
R = TypeVar("R", bound="TrainingRun[Any, Any]")


class TrainingRun(ABC, Generic[C, P]):
    """A run whose processes are up.

    prepared: what was read before.  groups: the workers of each role with processes of its own, by name.
    """

    def __init__(
        self, config: C, platform: Platform, tracker: Tracker, prepared: P, groups: Mapping[str, TrainGroup]
    ) -> None:
        self.config: C = config
        self.prepared: P = prepared
        self.tracker, self.groups = tracker, dict(groups)
        self.directory, self.progress = Path(config.trainer.default_local_dir), prepared.progress
        self.leaving, self.clock = Preemption(), Clock()
        self.device_peak = device_peak(config.trainer, config.actor.precision, platform)
        trained = [self.groups[role.name] for role in config.role_rows if role.trains]
        self.saver = Saver(
            self.directory, trained, config.trainer, self.progress.step, keep=prepared.identity.keep, warn=warn
        )

    @property
    def num_steps(self) -> int:
        """Of the whole run, those before a resume included."""
        return self.prepared.num_steps

    @property
    @abstractmethod
    def validates_first(self) -> bool:
        """Whether it is validated before the first step."""

    @abstractmethod
    async def validate(self, step: int) -> dict[str, float]:
        """Metrics of validation, with their time; none where there is nothing to validate with."""

    @abstractmethod
    def rates(self, metrics: Mapping[str, float], seconds: Mapping[str, float]) -> dict[str, float]:
        """Tokens a second.  metrics, seconds: of the step."""

    async def guard(self, metrics: Mapping[str, float]) -> None:
        """Look at the metrics of a step; AlarmError ends the run."""

    @contextmanager
    def place_kept(self) -> Iterator[None]:
        """Within: a step that is given up gives back what it took from the data."""
        sampler = self.prepared.sampler
        place = sampler.state_dict()
        try:
            yield
        except Preempted:
            sampler.load_state_dict(place)
            raise

    def profiled(self, step: int) -> AbstractAsyncContextManager[None]:
        """Within: where ``trainer.profile_steps`` names the step, every training process is traced."""
        return profiled([*self.groups.values()], step, self.config.trainer)

    def progress_now(self) -> Progress:
        """How far the run is, with its place in the data."""
        self.progress.sampler = self.prepared.sampler.state_dict()
        return self.progress

    async def save(self) -> None:
        """A checkpoint of the step that is complete, from wherever the trainer's memory is."""
        with self.clock("save"):
            await self.saver.save(self.progress_now())

    async def conclude_saving(self) -> None:
        """The step that is complete has a checkpoint.  CheckpointError: it cannot be written."""
        await self.saver.conclude(self.progress_now())

    async def export(self, name: str) -> Path:
        """The first role that is trained as a Hugging Face checkpoint, in ``RUN/hf/NAME``."""
        target, role = self.directory / "hf" / name, next(row for row in self.config.role_rows if row.trains)
        await run_checkpoints.export_hf(self.groups[role.name], Path(self.config.weights_of(role)), target)
        return target


async def every_step(run: R, train_step: Callable[[R, int], Awaitable[dict[str, float]]]) -> None:
    """From the step after ``run.progress.step`` to the last, with validation and checkpoints in between.

    Preempted: it was told to leave, and did after the step that ``run.progress`` says.  AlarmError: a guard stopped it.
    """
    trainer = run.config.trainer
    if run.validates_first:
        run.tracker.log(run.progress.step, await run.validate(run.progress.step) | run.clock.step())
    while run.progress.step < run.num_steps:
        step = run.progress.step + 1
        with run.place_kept():
            async with run.profiled(step):
                metrics = await train_step(run, step)
        run.progress.step = step
        if is_due(trainer.test_freq, step, run.num_steps):
            metrics |= await run.validate(step)
        seconds = run.clock.step()
        speed = run.rates(metrics, seconds) | utilization(metrics, seconds, trainer.world_size, run.device_peak)
        run.tracker.log(step, metrics | seconds | speed | run.saver.metrics())
        # After the line in metrics.jsonl, which no checkpoint may lack; the time it takes is the next step's.
        if is_due(trainer.save_freq, step, run.num_steps) or run.saver.failed:
            await run.save()
        await run.guard(metrics)
        run.leaving.unless_asked()


def open_directory(
    config: RunConfig | SftConfig, prepared: PreparedRun, planned: Plan, stack: AsyncExitStack
) -> Tracker:
    """The run directory with its plan, and Ray, until ``stack`` is closed.

    Checkpoints of another course of the run are set aside, unless nothing is trained.
    """
    trainer, directory = config.trainer, Path(config.trainer.default_local_dir)
    resumed = None if prepared.checkpoint is None else prepared.progress.step
    opening = Tracker.open(directory, trainer, as_dict(config), prepared.num_steps, resumed_step=resumed)
    tracker = stack.enter_context(opening)
    write_plan(planned, directory)
    if not trainer.val_only:
        run_checkpoints.set_aside_later(directory, prepared.progress.step)
    tracker.now("starting Ray")
    stack.enter_context(ray_cluster(config.ray_init, partial(run_checkpoints.how_to_go_on, directory)))
    return tracker
