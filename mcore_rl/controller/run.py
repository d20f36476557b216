"""A run: everything that lives longer than a step, and what is done with it between steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from mcore_rl.algorithms.role_loss import RoleLoss
from mcore_rl.config.run import RunConfig
from mcore_rl.config.stages import StepStage
from mcore_rl.config.step_plan import step_plan
from mcore_rl.config.trainer import ASYNC
from mcore_rl.controller.lifecycle.device_sharing import Devices
from mcore_rl.controller.lifecycle.elastic_engines import ElasticEngines
from mcore_rl.controller.lifecycle.messages import warn
from mcore_rl.controller.lifecycle.preparation import Prepared
from mcore_rl.controller.lifecycle.run_checkpoints import Progress
from mcore_rl.controller.lifecycle.saving import WriteMore
from mcore_rl.controller.rollouts.recording import Recorder, ReplaySource
from mcore_rl.controller.rollouts.rollout_source import Ahead, RolloutSource
from mcore_rl.controller.rollouts.stream import RolloutStream, drawing_of
from mcore_rl.controller.step.guards import Guards
from mcore_rl.controller.step.metrics import rates
from mcore_rl.controller.step.preemption import Preempted
from mcore_rl.controller.step.rollout_collection import CollectProgress, RolloutBatch, RolloutCollector
from mcore_rl.controller.step.samples import OF_A_STEP, OF_A_VALIDATION, Thumbnails, sample_rows
from mcore_rl.controller.step.validation import overall, validate
from mcore_rl.controller.training_run import TrainingRun
from mcore_rl.data.prompts import PromptRow, PromptSet
from mcore_rl.ground.errors import AlarmError
from mcore_rl.parallel.device import Platform
from mcore_rl.rollout.episodes import Episode
from mcore_rl.runtime.train_group import TrainGroup
from mcore_rl.tracking.jsonl import read_metrics
from mcore_rl.tracking.samples import Kind
from mcore_rl.tracking.sinks import Tracker


class Run(TrainingRun[RunConfig, Prepared]):
    """One run of ``mcore-rl train``; made by ``open_run``, or by ``open_replay`` without engines.

    losses: of each role that is trained.  collector: None where there are no engines.
    sharing: the roles whose engines share prompts, once ``train`` has asked them.
    """

    sharing: frozenset[str] = frozenset()

    def __init__(
        self,
        config: RunConfig,
        platform: Platform,
        tracker: Tracker,
        prepared: Prepared,
        groups: Mapping[str, TrainGroup],
        collector: RolloutCollector | None,
        devices: Devices,
        elastic: ElasticEngines | None = None,
        ahead: Ahead | None = None,
    ) -> None:
        super().__init__(config, platform, tracker, prepared, groups)
        self.collector = collector
        self.devices = devices
        self.elastic: AbstractAsyncContextManager[object] = elastic or nullcontext()
        self.recorder = Recorder(self.directory, warn=warn)
        self.thumbnails = Thumbnails(self.directory, warn=warn)
        self.rollouts = self._rollouts(ahead)
        self.tokenizer = prepared.tokenizer
        self.kl = prepared.kl
        self.on_accelerator = platform.is_accelerator
        self.guards = Guards(config.trainer.guards, read_metrics(self.directory / "metrics.jsonl"))
        self.num_drawn = self.num_tokens = 0  # responses, and tokens that were trained, of the last step
        self.losses: dict[str, RoleLoss] = {role.name: config.loss_of(role) for role in config.trained_rows}
        self._plans = {trains: step_plan(config, trains_policy=trains) for trains in (True, False)}

    def _rollouts(self, ahead: Ahead | None) -> RolloutSource | RolloutStream | ReplaySource:
        """What hands each step its rollouts, in ``trainer.mode`` and with ``rollout.partial``."""
        if self.collector is None:
            assert self.config.trainer.replay is not None, "without engines there is nothing but a record"
            return ReplaySource(Path(self.config.trainer.replay), self.row_of, self.prepared.sampler)
        sampler = self.prepared.sampler
        steps = self.num_steps
        shown = self.reporting("drawing")
        rollouts: RolloutSource | RolloutStream
        if ahead is None or not (self.config.trainer.mode is ASYNC or self.config.rollout.partial):
            rollouts = RolloutSource(self.collector, sampler, self.next_rows, steps, self.clock, shown, ahead)
        else:
            num_trained = self.progress.step * self.config.data.train_batch_size
            rollouts = RolloutStream(
                drawing_of(self.config, steps, ahead), sampler, self.next_rows, num_trained, self.clock, shown
            )
        if self.prepared.kept is not None:
            rollouts.resume(self.prepared.kept, self.progress.step)
        return rollouts

    @property
    def policy(self) -> TrainGroup:
        """The workers whose weights the engines draw with."""
        return self.groups[self.config.policy.name]

    def plan(self, step: int) -> tuple[StepStage, ...]:
        """The stages of ``step``, in order: the policy is not trained while its critic warms up."""
        return self._plans[step > self.config.trainer.critic_warmup]

    @property
    def epoch(self) -> float:
        """Passes over the training data, with fractions."""
        place = self.place
        return float(place["epoch"] + (place["position"] - len(place["again"])) / self.prepared.sampler.num_prompts)

    @property
    def place(self) -> dict[str, Any]:
        """Without the rows of rollouts that no step has yet."""
        return self.rollouts.place

    @contextmanager
    def place_kept(self) -> Iterator[None]:
        """Within: a step that is preempted gives its rollouts back, and what was begun since to the sampler."""
        kept = self.rollouts.kept
        try:
            yield
        except Preempted:
            self.rollouts.return_to(kept)
            raise

    async def take_back(self) -> None:
        """Takes unfinished responses from the engines, which go on with them."""
        await self.rollouts.take_back()

    def drawn_now(self) -> WriteMore:
        """Writes the rollouts that no step has, as they are now, into a checkpoint."""
        return partial(self.rollouts.kept.write, settings=self.prepared.draw_settings)

    def next_rows(self, count: int) -> list[PromptRow]:
        """The next ``count`` prompts of the sampler."""
        places = self.prepared.sampler.next_of_epochs(count)
        return [self.row_of(index, epoch) for epoch, index in places]

    def row_of(self, number: int, epoch: int) -> PromptRow:
        """A prompt of the training data, as it is drawn in an epoch."""
        assert self.prepared.train is not None
        return replace(self.prepared.train[number], epoch=epoch)

    def reporting(self, what: str) -> CollectProgress:
        """A callback that shows how many episodes are finished."""
        return lambda done, of: self.tracker.now(what, done, of)

    def keep_rollouts(self, step: int, rollouts: RolloutBatch, num_tokens: int) -> dict[str, Any]:
        """Counts what the step got, and begins to write it down; returns the place in the data after it.

        For people to read, if ``trainer.save_rollouts``; to the last bit, if ``trainer.record_rollouts``.
        num_tokens: of the sequences that it trains.
        """
        place = self.place
        trainer = self.config.trainer
        self.num_drawn = len(rollouts.episodes)
        self.num_tokens = num_tokens
        if trainer.save_rollouts:
            self._show(step, "rollouts", rollouts.episodes, self.prepared.train, OF_A_STEP)
        if trainer.record_rollouts:
            self.recorder.begin(step, rollouts, place)
        return place

    def _show(self, step: int, kind: Kind, episodes: Sequence[Episode], prompts: PromptSet | None, most: int) -> None:
        """Begins to write them down, and thumbnails of ``most`` of their pictures.  prompts: of their rows."""
        self.tracker.samples(step, kind, partial(sample_rows, step, episodes, self.tokenizer))
        if self.config.sees_pictures and prompts is not None:
            self.thumbnails.begin(prompts, episodes, most)

    async def validate(self, step: int) -> dict[str, float]:
        """Metrics of validation; exports the weights if this validation is the best so far."""
        if self.prepared.validation is None or self.collector is None:
            return {}
        self.tracker.now("validating")
        with self.clock("validate"):
            metrics, episodes = await validate(
                self.collector,
                self.prepared.validation,
                self.config.data.val_batch_size,
                self.reporting("validating"),
            )
            self._show(step, "validation", episodes, self.prepared.validation, OF_A_VALIDATION)
        value = overall(metrics)
        if value is not None and (self.progress.best is None or value > self.progress.best):
            self.progress.best, self.progress.best_step = value, step
            if step > 0:
                await self.export("best")
        return metrics

    async def guard(self, metrics: Mapping[str, float]) -> None:
        """Warn of what the guards see; raises AlarmError if they see something and ``trainer.guards.stop`` is set."""
        alarms = self.guards.see(metrics)
        for alarm in alarms:
            warn(f"step {self.progress.step}: {alarm}")
        if alarms and self.config.trainer.guards.stop:
            await self.conclude_saving()
            raise AlarmError(f"stopped after step {self.progress.step} (trainer.guards.stop): {'; '.join(alarms)}")

    def rates(self, metrics: Mapping[str, float], seconds: Mapping[str, float]) -> dict[str, float]:
        """Tokens and samples a second, of generation and of training."""
        epochs = self.config.trained_config(self.config.policy).ppo_epochs
        return rates(metrics, seconds, self.num_drawn, self.num_tokens * epochs)

    def progress_now(self) -> Progress:
        """How far the run is, with its place in the data and the state of the KL controller."""
        self.progress.kl = self.kl.state_dict()
        return super().progress_now()

    async def export(self, name: str) -> Path:
        """The policy as a Hugging Face checkpoint, in ``RUN/hf/NAME``."""
        with self.clock("save"):
            await self.devices.to_trainer(keep_weights=True)
            target = await super().export(name)
            await self.devices.to_engines(self.progress.step)
        return target
