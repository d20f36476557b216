"""``mcore-rl sft``: packed conversations through the engine, the loss on the assistant's turns alone."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from mcore_rl.algorithms.cross_entropy import CrossEntropy
from mcore_rl.config.compose import as_dict
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.sft import SftConfig, sft_violations
from mcore_rl.config.trainer import is_due
from mcore_rl.controller.lifecycle import run_checkpoints
from mcore_rl.controller.lifecycle.fault_tolerance import run_with_restarts
from mcore_rl.controller.lifecycle.messages import outcome, warn
from mcore_rl.controller.lifecycle.model_checks import model_sft_violations
from mcore_rl.controller.lifecycle.preemption import REQUEUE, Preempted, Preemption
from mcore_rl.controller.lifecycle.resume_check import Identity, note_differences
from mcore_rl.controller.lifecycle.run_checkpoints import Progress
from mcore_rl.controller.lifecycle.saving import Saver, load_state
from mcore_rl.controller.lifecycle.start_plan import forecast, write_plan
from mcore_rl.controller.step import updates
from mcore_rl.controller.step.profiling import profiled
from mcore_rl.controller.step.utilization import Passes, device_peak, tflop, utilization
from mcore_rl.data.conversations import Conversation, ConversationSet
from mcore_rl.data.sampler import PromptSampler
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.errors import refuse_if_any
from mcore_rl.families.config_json import read_config
from mcore_rl.families.registry import model_of
from mcore_rl.parallel.device import detect
from mcore_rl.runtime.cluster import ray_cluster
from mcore_rl.runtime.placement import place_trainers
from mcore_rl.runtime.start import start_trainers
from mcore_rl.runtime.train_group import TrainGroup
from mcore_rl.runtime.train_worker import RoleSpec
from mcore_rl.tracking.clock import Clock
from mcore_rl.tracking.report import write_report
from mcore_rl.tracking.sinks import Tracker
from mcore_rl.types import TrainBatch

ROLE = "actor"
SCORED_AT_ONCE = 1024  # validation conversations


@dataclass(kw_only=True)
class Sft:
    """A run.  num_steps: of all of it."""

    config: SftConfig
    train: ConversationSet
    validation: ConversationSet | None
    sampler: PromptSampler
    progress: Progress
    checkpoint: Path | None
    identity: Identity
    model: ModelConfig
    num_steps: int

    @property
    def directory(self) -> Path:
        """The run directory."""
        return Path(self.config.trainer.default_local_dir)


def prepare(config: SftConfig) -> Sft:
    """Read what must be read.  Raises ConfigError and kin with everything that keeps the run from starting."""
    refuse_if_any(sft_violations(config))
    place, path = Path(config.trainer.default_local_dir).resolve(), Path(config.model.path).resolve()
    config = replace(
        config,
        model=replace(config.model, path=str(path)),
        trainer=replace(config.trainer, default_local_dir=str(place)),
    )
    _, model = model_of(read_config(path))
    refuse_if_any(model_sft_violations(config, model))
    tokenizer, data, trainer = load_tokenizer(config.model.tokenizer_path or path), config.data, config.trainer
    files, title = data.train_files, "data.train_files"
    train = ConversationSet.load(files, data, tokenizer, max_samples=data.train_max_samples, title=title)
    validation = None
    if data.val_files:
        files, title = data.val_files, "data.val_files"
        validation = ConversationSet.load(files, data, tokenizer, max_samples=data.val_max_samples, title=title)
    sampler, progress = PromptSampler(len(train), data.seed, data.shuffle), Progress()
    per_epoch = sampler.batches_per_epoch(data.train_batch_size)
    identity = Identity.of(as_dict(config), [ROLE])
    checkpoint = run_checkpoints.to_resume(trainer, warn)
    if checkpoint is not None:
        note_differences(identity, checkpoint)
        progress = run_checkpoints.read_progress(checkpoint)
        sampler.load_state_dict(progress.sampler)
    return Sft(
        config=config,
        train=train,
        validation=validation,
        sampler=sampler,
        progress=progress,
        checkpoint=checkpoint,
        identity=identity,
        model=model,
        num_steps=trainer.total_training_steps or per_epoch * trainer.total_epochs,
    )


async def run_sft(config: SftConfig) -> int:
    """Train, validate, save, export to ``RUN/hf/final``; 0, or ``REQUEUE`` where a signal made it leave before the end.

    RunRestarts and signals are answered as in ``run_training``.
    """
    try:
        exported = await run_with_restarts(config, _attempt)
    except Preempted as left:
        outcome(str(left))
        return REQUEUE
    outcome(f"final weights: {exported}")
    outcome(f"report: {write_report(Path(config.trainer.default_local_dir).resolve())}")
    return 0


async def _attempt(config: SftConfig) -> Path:
    """From the newest checkpoint to the end; where the final weights are.  Preempted: it was told to, and has saved."""
    sft, leaving = prepare(config), Preemption()
    async with AsyncExitStack() as stack:
        opening = stack.enter_async_context(_workers(sft))
        workers = await leaving.unless_told(opening, partial(_train, sft, leaving))
        try:
            await workers.conclude_saving()
        finally:
            exported = sft.directory / "hf" / "final"
            await run_checkpoints.export_hf(workers.group, Path(sft.config.model.path), exported)
    return exported


@dataclass
class _Workers:
    """What ``sft`` has while it goes on.  peak: of a device, TFLOP/s."""

    sft: Sft
    group: TrainGroup
    saver: Saver
    tracker: Tracker
    peak: float | None

    @property
    def progress(self) -> Progress:
        """Of the run, the place in its data included."""
        self.sft.progress.sampler = self.sft.sampler.state_dict()
        return self.sft.progress

    async def conclude_saving(self) -> None:
        """See ``Resumable``."""
        await self.saver.conclude(self.progress)


@asynccontextmanager
async def _workers(sft: Sft) -> AsyncIterator[_Workers]:
    """Ready to train, from the checkpoint that is gone on from, if any."""
    config, trainer = sft.config, sft.config.trainer
    platform = detect(trainer.device)
    planned = forecast(config, platform, sft.model)
    resumed = None if sft.checkpoint is None else sft.progress.step
    with Tracker.open(sft.directory, trainer, as_dict(config), sft.num_steps, resumed_step=resumed) as tracker:
        write_plan(planned, sft.directory)
        run_checkpoints.set_aside_later(sft.directory, sft.progress.step)
        tracker.now("starting the trainer")
        with ray_cluster(config.ray_init, partial(run_checkpoints.how_to_go_on, sft.directory)):
            places = await place_trainers(trainer, platform)
            path = Path(config.model.path)
            spec = RoleSpec(role=ROLE, directory=path, engine=config.actor, parallel=config.actor.parallel)
            group = await start_trainers(spec, places, platform, sft.directory / "logs", trainer)
            saver = Saver(sft.directory, [group], trainer, sft.progress.step, keep=sft.identity.keep, warn=warn)
            try:
                await group.build()
                if sft.checkpoint is not None:
                    await load_state(group, sft.checkpoint)
                yield _Workers(sft, group, saver, tracker, device_peak(trainer, config.actor.precision, platform))
            finally:
                try:
                    await saver.close()
                finally:
                    group.close()
                    places.close()


async def _train(sft: Sft, leaving: Preemption, workers: _Workers) -> None:
    """Preempted: it was told to leave, and did after the step that ``sft.progress`` says."""
    trainer, clock = sft.config.trainer, Clock()
    group, saver, tracker = workers.group, workers.saver, workers.tracker
    if trainer.val_before_train and sft.validation is not None and sft.progress.step == 0:
        with clock("validate"):
            metrics = await _validate(sft.validation, group)
        tracker.log(0, metrics | clock.step())
    while sft.progress.step < sft.num_steps:
        step = sft.progress.step + 1
        async with profiled([group], step, trainer):
            with clock("update_actor"):
                rows = sft.sampler.next(sft.config.data.train_batch_size)
                batch = batch_of([sft.train[index] for index in rows])
                metrics = await _step(batch, group)
        metrics |= tflop(batch.lengths_S, [Passes(model=sft.model, scored=0, trained=1)])
        if sft.validation is not None and is_due(trainer.test_freq, step, sft.num_steps):
            with clock("validate"):
                metrics |= await _validate(sft.validation, group)
        sft.progress.step = step
        seconds = clock.step()
        metrics["perf/trained_tokens_per_s"] = sum(batch.lengths_S) / seconds["time/update_actor"]
        metrics |= utilization(metrics, seconds, trainer.world_size, workers.peak)
        tracker.log(step, metrics | seconds | saver.metrics())
        # After the line in metrics.jsonl, which no checkpoint may lack; the time it takes is the next step's.
        if saver.failed or is_due(trainer.save_freq, step, sft.num_steps):
            with clock("save"):
                await saver.save(workers.progress)
        leaving.unless_asked()


async def _step(batch: TrainBatch, group: TrainGroup) -> dict[str, float]:
    result = await updates.update_alone(group, batch, CrossEntropy())
    routers = {name: value for name, value in result.metrics.items() if name.startswith("router/")}
    return routers | {
        "sft/loss": result.loss,
        "actor/grad_norm": result.grad_norm,
        "actor/lr": result.lr,
        "actor/skipped_updates": float(result.skipped is not None),
    }


async def _validate(conversations: ConversationSet, group: TrainGroup) -> dict[str, float]:
    """Mean over the trained tokens of all of ``conversations``."""
    total, count, number = 0.0, 0, len(conversations)
    for start in range(0, number, SCORED_AT_ONCE):
        chosen = [conversations[index] for index in range(start, min(start + SCORED_AT_ONCE, number))]
        while len(chosen) < group.layout.dp:  # every rank scores something; what is there twice is not trained
            chosen.append(replace(chosen[0], mask=(False,) * len(chosen[0].mask)))
        batch = batch_of(chosen)
        shared = updates.send(group, batch, [range(len(chosen))])
        total -= float((await updates.score(group, shared, "old_logprobs_T")).sums_S.sum())
        count += int(batch.mask_T.sum())
    return {"sft/val_loss": total / count}


def batch_of(conversations: Sequence[Conversation]) -> TrainBatch:
    """Laid end to end; nothing predicts a first token, so it is not trained."""
    masks = [torch.tensor(each.mask) for each in conversations]
    for mask in masks:
        mask[0] = False
    return TrainBatch(
        lengths_S=tuple(len(each.tokens) for each in conversations),
        tokens_T=torch.tensor([token for each in conversations for token in each.tokens]),
        mask_T=torch.cat(masks),
    )
