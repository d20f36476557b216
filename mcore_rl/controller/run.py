"""A run: everything that lives longer than a step, and what is done with it between steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from functools import partial
from pathlib import Path

from torch import Tensor

from mcore_rl.algorithms.role_loss import RoleLoss
from mcore_rl.config.role import Role, moves_after
from mcore_rl.config.run import RunConfig
from mcore_rl.controller.lifecycle import run_checkpoints
from mcore_rl.controller.lifecycle.device_sharing import DeviceSharing
from mcore_rl.controller.lifecycle.messages import warn
from mcore_rl.controller.lifecycle.preemption import Preempted, Preemption
from mcore_rl.controller.lifecycle.preparation import Prepared
from mcore_rl.controller.lifecycle.run_checkpoints import Progress
from mcore_rl.controller.lifecycle.saving import Saver
from mcore_rl.controller.lifecycle.weight_sync import WeightSync
from mcore_rl.controller.step import updates
from mcore_rl.controller.step.advantages import StepAdvantages
from mcore_rl.controller.step.guards import Guards
from mcore_rl.controller.step.profiling import profiled
from mcore_rl.controller.step.rollout_collection import CollectProgress, RolloutCollector
from mcore_rl.controller.step.samples import sample_rows
from mcore_rl.controller.step.utilization import Passes, device_peak
from mcore_rl.controller.step.validation import overall, validate
from mcore_rl.data.prompts import PromptRow
from mcore_rl.episodes import Episode
from mcore_rl.errors import AlarmError
from mcore_rl.parallel.device import Platform
from mcore_rl.runtime.shared_batch import SharedBatch
from mcore_rl.runtime.train_group import TrainGroup
from mcore_rl.tracking.clock import Clock
from mcore_rl.tracking.jsonl import read_metrics
from mcore_rl.tracking.sinks import Tracker


class Run:
    """One run of ``mcore-rl train``; made by ``open_run``.

    groups: the workers of each role with processes of its own, by name.  losses: of each role that is trained.
    num_steps: of the whole run, those before a resume included.
    """

    def __init__(
        self,
        config: RunConfig,
        platform: Platform,
        tracker: Tracker,
        prepared: Prepared,
        groups: Mapping[str, TrainGroup],
        collector: RolloutCollector,
        devices: DeviceSharing,
        weights: WeightSync,
    ) -> None:
        self.config, self.tracker, self.groups = config, tracker, dict(groups)
        self.collector, self.devices, self.weights, self.prepared = collector, devices, weights, prepared
        self.tokenizer, self.progress, self.kl = prepared.tokenizer, prepared.progress, prepared.kl
        self.on_accelerator = platform.is_accelerator
        self.device_peak = device_peak(config.trainer, config.actor.precision, platform)
        self.leaving = Preemption()
        self.directory = Path(config.trainer.default_local_dir)
        self.guards = Guards(config.trainer.guards, read_metrics(self.directory / "metrics.jsonl"))
        self.losses: dict[str, RoleLoss] = {
            role.name: role.make_loss(config.trained_config(role)) for role in config.trained_rows
        }
        self.clock = Clock()
        self.saver = Saver(
            self.directory,
            [self.groups[role.name] for role in config.role_rows if role.trains],
            config.trainer,
            self.progress.step,
            keep=prepared.identity.keep,
            warn=warn,
        )

    @property
    def policy(self) -> TrainGroup:
        """The workers whose weights the engines draw with."""
        return self.groups[self.config.policy.name]

    @property
    def num_steps(self) -> int:
        """Of the whole run."""
        return self.prepared.num_steps

    @property
    def num_sequences(self) -> int:
        """Of a step."""
        return self.config.data.train_batch_size * self.config.rollout.n

    def passes(self, num_updates: Mapping[str, int]) -> list[Passes]:
        """What the models did with the sequences of a step.  num_updates: of each role that is trained."""
        config, found = self.config, list[Passes]()
        for role in config.group_rows:
            trained, scored = 0.0, bool(role.makes) + len(config.snapshots_of(role.name))
            if role.trains:
                mini = config.trained_config(role).ppo_mini_batch_size
                trained = num_updates[role.name] * mini / config.data.train_batch_size
            model = self.prepared.models[role.name]
            found.append(Passes(model=model, scored=scored, trained=trained, head=role.head))
        return found

    def minibatches(self, group_S: Tensor, step: int) -> dict[str, list[list[int]]]:
        """The sequences of each optimizer step of ``step``, of each role that is trained.  See ``updates``."""
        data = self.config.data
        return {
            role.name: updates.minibatches(
                group_S, self.config.trained_config(role), data.train_batch_size, data.seed + step
            )
            for role in self.config.trained_rows
        }

    async def update(
        self,
        role: Role,
        shared: SharedBatch,
        minibatches: Sequence[Sequence[int]],
        advantages: StepAdvantages,
        step: int,
    ) -> updates.Updated:
        """One optimizer step of ``role`` for each of ``minibatches``."""
        config, snapshots = self.config, self.config.snapshots_of(role.name)
        return await updates.update(
            self.groups[role.name],
            shared,
            self.losses[role.name],
            config.trained_config(role),
            minibatches,
            advantages,
            reads=updates.fields_read(role, config.role_rows),
            temperature=config.rollout.temperature,
            reference=snapshots[0].snapshot if snapshots else None,
            seed=config.data.seed + step,
        )

    async def move_snapshots(self, role: Role, step: int) -> None:
        """Bring frozen weights in the processes of ``role`` after its own, where they are to move after ``step``."""
        for frozen in self.config.snapshots_of(role.name):
            if moves_after(frozen.moves, step):
                assert frozen.snapshot is not None
                await self.groups[role.name].move_snapshot(frozen.snapshot)

    @property
    def epoch(self) -> float:
        """Passes over the training data, with fractions."""
        sampler, state = self.prepared.sampler, self.prepared.sampler.state_dict()
        return float(sampler.epoch + state["position"] / sampler.num_prompts)

    def next_rows(self, count: int) -> list[PromptRow]:
        """The next prompts."""
        assert self.prepared.train is not None
        return [self.prepared.train[index] for index in self.prepared.sampler.next(count)]

    def reporting(self, what: str) -> CollectProgress:
        """Shows how many episodes are finished."""
        return lambda done, of: self.tracker.now(what, done, of)

    def keep_rollouts(self, step: int, episodes: Sequence[Episode]) -> None:
        """For people to read."""
        if self.config.trainer.save_rollouts:
            self.tracker.samples(step, "rollouts", partial(sample_rows, step, episodes, self.tokenizer))

    @contextmanager
    def place_kept(self) -> Iterator[None]:
        """Within: a step that is given up gives its prompts back."""
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

    async def validate(self, step: int) -> dict[str, float]:
        """Metrics of validation; the best weights so far are exported when they are these."""
        if self.prepared.validation is None:
            return {}
        with self.clock("validate"):
            metrics, episodes = await validate(
                self.collector,
                self.prepared.validation,
                self.config.data.val_batch_size,
                self.reporting("validating"),
            )
            self.tracker.samples(step, "validation", partial(sample_rows, step, episodes, self.tokenizer))
        value = overall(metrics)
        if value is not None and (self.progress.best is None or value > self.progress.best):
            self.progress.best, self.progress.best_step = value, step
            if step > 0:
                await self.export("best")
        return metrics

    async def save(self) -> None:
        """A checkpoint of the step that is complete, from wherever the trainer's memory is."""
        with self.clock("save"):
            await self.saver.save(self._progress())

    async def guard(self, metrics: Mapping[str, float]) -> None:
        """Tell what is wrong with the run.  AlarmError: something is, and ``trainer.guards.stop``."""
        alarms = self.guards.see(metrics)
        for alarm in alarms:
            warn(f"step {self.progress.step}: {alarm}")
        if alarms and self.config.trainer.guards.stop:
            await self.conclude_saving()
            raise AlarmError(f"stopped after step {self.progress.step} (trainer.guards.stop): {'; '.join(alarms)}")

    async def conclude_saving(self) -> None:
        """The step that is complete has a checkpoint.  CheckpointError: it cannot be written."""
        await self.saver.conclude(self._progress())

    def _progress(self) -> Progress:
        self.progress.sampler, self.progress.kl = self.prepared.sampler.state_dict(), self.kl.state_dict()
        return self.progress

    async def export(self, name: str) -> Path:
        """The policy as a Hugging Face checkpoint, in ``RUN/hf/NAME``."""
        target = self.directory / "hf" / name
        with self.clock("save"):
            await self.devices.to_trainer(keep_weights=True)
            await run_checkpoints.export_hf(self.policy, Path(self.config.model.path), target)
            async with self.devices.to_engines():
                await self.weights.update(self.progress.step)
        return target
