"""What every trainer shares while it runs, and the loop over steps; a trainer adds only what differs.

``train`` adds engines, rollouts and a policy (``controller/run.py``); ``sft`` adds one role and batches of
conversations (``programs/sft.py``).  A third trainer declares its roles, what it prepares, and one step;
``programs/program.py`` runs it.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from mcore_rl.config.compose import as_dict
from mcore_rl.config.offline import OfflineConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.config.trainer import Placement, is_due
from mcore_rl.controller.lifecycle import run_checkpoints
from mcore_rl.controller.lifecycle.hub_pushes import BEST, HubPushes
from mcore_rl.controller.lifecycle.messages import note, warn
from mcore_rl.controller.lifecycle.preparation import PreparedRun
from mcore_rl.controller.lifecycle.resume_check import note_differences
from mcore_rl.controller.lifecycle.run_checkpoints import Progress
from mcore_rl.controller.lifecycle.saving import Saver, WriteMore, write_nothing
from mcore_rl.controller.lifecycle.start_plan import write_plan
from mcore_rl.controller.step.preemption import Preempted, Preemption
from mcore_rl.controller.step.utilization import device_peak, host_use, utilization
from mcore_rl.ground.errors import CheckpointError, RunDirectoryError
from mcore_rl.parallel.device import Platform
from mcore_rl.planning.plan import Plan
from mcore_rl.runtime.cluster import ray_cluster
from mcore_rl.runtime.train_group import TrainGroup
from mcore_rl.tracking.clock import Clock
from mcore_rl.tracking.lanes import TRAINER, Lane, StepLanes, idle_share, trainer_lane, trainer_state
from mcore_rl.tracking.run_directory import earlier_records
from mcore_rl.tracking.run_owner import RunOwner
from mcore_rl.tracking.sinks import Tracker

C = TypeVar("C", bound=RunConfig | OfflineConfig)
P = TypeVar("P", bound=PreparedRun)
R = TypeVar("R", bound="TrainingRun[Any, Any]")
# Called with a step's number and its metrics, those of metrics.jsonl.  True: the run ends after this step.
Callback = Callable[[int, Mapping[str, float]], object]


class TrainingRun(ABC, Generic[C, P]):
    """A run whose processes are up.

    prepared: what was read before they were started.  groups: the worker group of each role that has one, by the name
    of the role.  progress: of the steps that are complete.  preemption: whether a signal asked the run to leave.
    owner: holds the run directory; None: nobody checks it.  callbacks: called after every step.
    pushes: to the Hub; None: nothing is pushed.
    lanes: of the engines that draw.
    """

    def __init__(
        self, config: C, platform: Platform, tracker: Tracker, prepared: P, groups: Mapping[str, TrainGroup]
    ) -> None:
        self.config: C = config
        self.prepared: P = prepared
        self.tracker = tracker
        self.groups = dict(groups)
        self.directory = Path(config.trainer.default_local_dir)
        self.progress = prepared.progress
        self.preemption = Preemption()
        self.clock = Clock()
        self.owner: RunOwner | None = None
        self.pushes: HubPushes | None = None
        self.callbacks: Sequence[Callback] = ()
        self.lanes: Sequence[Lane] = ()
        self.device_peak = device_peak(config.trainer, config.actor.precision, platform)
        trained = [self.groups[role.name] for role in config.role_rows if role.trains]
        self.saver = Saver(
            self.directory, trained, config.trainer, self.progress.step, keep=prepared.identity.keep, warn=warn
        )

    @property
    def num_steps(self) -> int:
        """Steps of the whole run, those before a resume included."""
        return self.prepared.num_steps

    @property
    def validates_first(self) -> bool:
        """Whether it validates before the first step: a fresh run, or one that does nothing else."""
        trainer = self.config.trainer
        return trainer.val_only or (trainer.val_before_train and self.progress.step == 0)

    @abstractmethod
    async def validate(self, step: int) -> dict[str, float]:
        """Metrics of a validation; an empty dict without validation data."""

    @abstractmethod
    def rates(self, metrics: Mapping[str, float], seconds: Mapping[str, float]) -> dict[str, float]:
        """Rates (``perf/*``) of a step, from its metrics and the seconds of its phases (``time/*``)."""

    async def guard(self, metrics: Mapping[str, float]) -> None:
        """Look at the metrics of a finished step; raises AlarmError to end the run."""

    def call_back(self, step: int, metrics: Mapping[str, float]) -> None:
        """Tells every callback of a step; one that answers True before the last asks the run to leave.

        Raises what a callback raises.
        """
        for callback in self.callbacks:
            if callback(step, dict(metrics)) is True and step < self.num_steps:
                self.preemption.ask("the word of a callback")

    @property
    def place(self) -> dict[str, Any]:
        """The sampler's state after the rows of the steps that were begun, as a checkpoint records it."""
        return self.prepared.sampler.state_dict()

    @contextmanager
    def place_kept(self) -> Iterator[None]:
        """Within: a step that is preempted gives its rows back to the sampler."""
        place = self.place
        try:
            yield
        except Preempted:
            self.prepared.sampler.load_state_dict(place)
            raise

    def watch(self, lanes: Sequence[Lane]) -> None:
        """Records what the engines of ``lanes`` do, from now on: they may be older than this run."""
        self.lanes = lanes
        now = time.perf_counter()
        for lane in lanes:
            lane.take(now, now)
        self.tracker.watch(lanes)

    def clocked(self) -> tuple[dict[str, float], StepLanes]:
        """Ends the clock's step: its seconds (``time/*``) with the shares of idle time, and what everybody did."""
        begin = self.clock.begun
        seconds = self.clock.step()
        whole = seconds["time/step"]
        lanes = {lane.name: lane.take(begin, self.clock.begun) for lane in self.lanes}
        taken = StepLanes(time.time() - whole, whole, {TRAINER: trainer_lane(self.clock.spans)} | lanes)
        if self.lanes and self.config.trainer.placement is Placement.separate:
            idle = [idle_share(lane.seconds, whole) for lane in self.lanes]
            busy = sum(
                spent for name, spent in seconds.items() if trainer_state(name.removeprefix("time/")) is not None
            )
            seconds["perf/engines_idle_share"] = sum(idle) / len(idle)
            seconds["perf/trainer_idle_share"] = max(0.0, 1 - busy / whole) if whole > 0 else 0.0
        return seconds, taken

    @asynccontextmanager
    async def profiled(self, step: int) -> AsyncIterator[None]:
        """Within: torch's profiler traces every training process, if ``trainer.profile_steps`` names the step.

        On exit, writes ``profiles/step_N/ROLE-rank-R.json`` in the run directory; a step that fails writes none.
        """
        if step not in self.config.trainer.profile_steps:
            yield
            return
        for group in self.groups.values():
            await group.start_profile()
        yield
        for group in self.groups.values():
            await group.stop_profile(self.directory / "profiles" / f"step_{step}")

    def progress_now(self) -> Progress:
        """How far the run is, with its place in the data."""
        self.progress.sampler = self.place
        return self.progress

    async def save(self) -> None:
        """Save a checkpoint of the last complete step, wherever the trainer's memory is."""
        with self.clock("save"):
            await self.take_back()
            await self.saver.save(self.progress_now(), self.drawn_now())

    async def conclude_saving(self) -> None:
        """Make sure that the last complete step has a checkpoint.  Raises CheckpointError if it cannot be written."""
        await self.saver.conclude(self.progress_now(), self.drawn_now())

    async def take_back(self) -> None:
        """Takes what is being drawn to where ``drawn_now`` finds it; here nothing is."""

    def drawn_now(self) -> WriteMore:
        """Writes what was drawn and not trained, as it is now, into a checkpoint; here there is nothing."""
        return write_nothing

    async def check_directory(self) -> None:
        """Make sure that the run directory is still there and still this run's.

        RunDirectoryError: it is gone, and the last step is saved elsewhere, if it can be; or another run has it.
        """
        if self.owner is None:
            return
        if (gone := self.owner.check(warn)) is None:
            return
        for place in gone.places:
            self.saver.move_to(place)
            try:
                place.mkdir(parents=True, exist_ok=True)
                await self.conclude_saving()
            except (OSError, CheckpointError) as error:
                warn(f"{place}: the run cannot be saved there: {error}")
                continue
            raise RunDirectoryError(
                f"{gone}. Step {self.progress.step} is saved in {place}: "
                f"the same command with trainer.default_local_dir={place} goes on from there"
            )
        raise RunDirectoryError(f"{gone}. Step {self.progress.step} could not be saved anywhere")

    async def export(self, name: str) -> Path:
        """Write the first trained role as a Hugging Face checkpoint to ``RUN/hf/NAME``, and return that path."""
        target = self.directory / "hf" / name
        role = next(row for row in self.config.role_rows if row.trains)
        source = Path(self.config.weights_of(role))
        await run_checkpoints.export_hf(self.groups[role.name], source, target, self.progress.step)
        return target


async def every_step(run: R, train_step: Callable[[R, int], Awaitable[dict[str, float]]]) -> None:
    """Take every step that is left, with validation and checkpoints in between.

    Raises Preempted if a signal or a callback asked the run to leave (``run.progress`` is then the last complete step),
    AlarmError if a guard stopped it, RunDirectoryError if its directory is gone, and what a callback raises.

    Args:
        train_step: takes step number N (from 1) and returns its metrics.
    """
    trainer = run.config.trainer
    if run.validates_first:
        first = await run.validate(run.progress.step)
        seconds, lanes = run.clocked()
        first |= seconds
        run.tracker.log(run.progress.step, first)
        run.tracker.timeline(run.progress.step, run.clock.spans, lanes)
        run.call_back(run.progress.step, first)
        run.preemption.raise_if_asked()
    host_use()  # the first step's begins here
    while run.progress.step < run.num_steps:
        step = run.progress.step + 1
        with run.place_kept():
            async with run.profiled(step):
                metrics = await train_step(run, step)
        run.progress.step = step
        if is_due(trainer.test_freq, step, run.num_steps):
            metrics |= await run.validate(step)
        seconds, lanes = run.clocked()
        speed = run.rates(metrics, seconds) | utilization(metrics, seconds, trainer.world_size, run.device_peak)
        metrics |= seconds | speed | host_use() | run.saver.metrics()
        run.tracker.log(step, metrics)
        run.tracker.timeline(step, run.clock.spans, lanes)
        await run.check_directory()
        if run.pushes is not None and run.progress.best_step > 0:  # when the line is there that the model card reads
            await run.pushes.add(BEST)
        # After the line in metrics.jsonl, which no checkpoint may lack; the time it takes is the next step's.
        if is_due(trainer.save_freq, step, run.num_steps) or run.saver.failed:
            await run.save()
        run.call_back(step, metrics)
        await run.guard(metrics)
        run.preemption.raise_if_asked()


def open_directory(
    config: RunConfig | OfflineConfig,
    prepared: PreparedRun,
    platform: Platform,
    stack: AsyncExitStack,
    ray_stack: AsyncExitStack | None,
) -> Tracker:
    """Open the loggers, which ``stack`` closes, and start Ray, which ``ray_stack`` stops; None: it is there.

    Nothing of an earlier run in the directory changes.  Says whether this one goes on, or what it will move aside.
    """
    trainer = config.trainer
    directory = Path(config.trainer.default_local_dir)
    resumed = None if prepared.checkpoint is None or trainer.val_only else prepared.progress.step
    if prepared.checkpoint is not None:
        note_differences(prepared.identity, prepared.checkpoint)
    if prepared.checkpoint is not None and not trainer.val_only:
        note(f"goes on from {prepared.checkpoint}: step {prepared.progress.step} of {prepared.num_steps} is trained")
    elif earlier_records(directory):
        note(f"begins anew: the records of the run that was in {directory} are moved to its folder earlier")
    devices = {"device": platform.kind, "device_name": platform.device_name}
    opening = Tracker.open(
        directory, trainer, as_dict(config), prepared.num_steps, resumed_step=resumed, devices=devices, begin=False
    )
    tracker = stack.enter_context(opening)
    if ray_stack is not None:
        tracker.now("starting Ray")
        ray_stack.enter_context(ray_cluster(config.ray_init, partial(run_checkpoints.how_to_go_on, directory)))
    return tracker


def begin_records(config: RunConfig | OfflineConfig, prepared: PreparedRun, planned: Plan, tracker: Tracker) -> None:
    """Begin the records of a run whose processes are up; those of a fresh run's forerunners are moved aside.

    Checkpoints after the step that the run resumes from are set aside, unless the run only validates.  Nothing is
    written where no step is left, and only the weights are still to be exported.
    """
    directory = Path(config.trainer.default_local_dir)
    if not config.trainer.val_only and prepared.progress.step >= prepared.num_steps:
        return
    tracker.begin()
    write_plan(planned, directory)
    if not config.trainer.val_only:
        run_checkpoints.set_aside_later(directory, prepared.progress.step)
