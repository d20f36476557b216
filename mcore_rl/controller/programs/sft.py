"""``mcore-rl sft``: packed conversations through the engine, the loss on the assistant's turns alone."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mcore_rl.algorithms.cross_entropy import CrossEntropy
from mcore_rl.config.compose import as_dict
from mcore_rl.config.sft import ACTOR, SftConfig, sft_violations
from mcore_rl.controller.lifecycle.fault_tolerance import run_with_restarts
from mcore_rl.controller.lifecycle.messages import outcome
from mcore_rl.controller.lifecycle.model_checks import model_sft_violations
from mcore_rl.controller.lifecycle.preemption import REQUEUE, Preempted, Preemption
from mcore_rl.controller.lifecycle.preparation import PreparedRun, to_resume
from mcore_rl.controller.lifecycle.resume_check import Identity
from mcore_rl.controller.lifecycle.start_plan import forecast
from mcore_rl.controller.lifecycle.start_roles import start_roles
from mcore_rl.controller.step import updates
from mcore_rl.controller.step.utilization import Passes, tflop
from mcore_rl.controller.training_run import TrainingRun, every_step, open_directory
from mcore_rl.data.conversations import Conversation, ConversationSet
from mcore_rl.data.sampler import PromptSampler
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.errors import refuse_if_any
from mcore_rl.families.config_json import read_config
from mcore_rl.families.registry import model_of
from mcore_rl.parallel.device import detect
from mcore_rl.runtime.placement import place_trainers
from mcore_rl.runtime.train_group import TrainGroup
from mcore_rl.tracking.report import write_report
from mcore_rl.types import TrainBatch

SCORED_AT_ONCE = 1024  # validation conversations


@dataclass(kw_only=True)
class PreparedSft(PreparedRun):
    """What ``sft`` knows before a process is started; config: with what follows from other fields."""

    config: SftConfig
    train: ConversationSet
    validation: ConversationSet | None


def prepare(config: SftConfig) -> PreparedSft:
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
    sampler = PromptSampler(len(train), data.seed, data.shuffle)
    per_epoch = sampler.batches_per_epoch(data.train_batch_size)
    identity = Identity.of(as_dict(config), [role.name for role in config.role_rows])
    checkpoint, progress = to_resume(config, identity, sampler)
    return PreparedSft(
        config=config,
        train=train,
        validation=validation,
        sampler=sampler,
        progress=progress,
        checkpoint=checkpoint,
        identity=identity,
        models={ACTOR.name: model},
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
    prepared, leaving = prepare(config), Preemption()

    async def begin(run: SftRun) -> None:
        run.leaving = leaving
        await every_step(run, train_step)

    async with AsyncExitStack() as stack:
        run = await leaving.unless_told(stack.enter_async_context(open_run(prepared)), begin)
        try:
            await run.conclude_saving()
        finally:
            exported = await run.export("final")
    return exported


class SftRun(TrainingRun[SftConfig, PreparedSft]):
    """One run of ``mcore-rl sft``.  num_tokens: of the step before."""

    num_tokens = 0

    @property
    def group(self) -> TrainGroup:
        """The workers of the one role."""
        return self.groups[ACTOR.name]

    @property
    def validates_first(self) -> bool:
        """See ``TrainingRun``."""
        begins = self.progress.step == 0 and self.prepared.validation is not None
        return begins and self.config.trainer.val_before_train

    async def validate(self, step: int) -> dict[str, float]:
        """See ``TrainingRun``."""
        if self.prepared.validation is None:
            return {}
        with self.clock("validate"):
            return await _validate(self.prepared.validation, self.group)

    def rates(self, metrics: Mapping[str, float], seconds: Mapping[str, float]) -> dict[str, float]:
        """See ``TrainingRun``."""
        return {"perf/trained_tokens_per_s": self.num_tokens / seconds["time/update_actor"]}


@asynccontextmanager
async def open_run(prepared: PreparedSft) -> AsyncIterator[SftRun]:
    """Within: ready to train, from the checkpoint that is gone on from, if any.  After: no process is left."""
    config = prepared.config
    platform = detect(config.trainer.device)
    planned = forecast(config, platform, prepared.models)
    async with AsyncExitStack() as stack:
        tracker = open_directory(config, prepared, planned, stack)
        tracker.now("starting the trainer")
        places = await place_trainers(config.trainer, platform)
        stack.callback(places.close)
        groups = await start_roles(config, prepared.checkpoint, places, platform, stack)
        run = SftRun(config, platform, tracker, prepared, groups)
        stack.push_async_callback(run.saver.close)
        yield run


async def train_step(run: SftRun, step: int) -> dict[str, float]:
    """One step: the next conversations, one optimizer step."""
    prepared = run.prepared
    with run.clock(ACTOR.update_phase):
        rows = prepared.sampler.next(run.config.data.train_batch_size)
        batch = batch_of([prepared.train[index] for index in rows])
        metrics = await _step(batch, run.group)
    run.num_tokens = sum(batch.lengths_S)
    return metrics | tflop(batch.lengths_S, [Passes(model=prepared.models[ACTOR.name], scored=0, trained=1)])


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
