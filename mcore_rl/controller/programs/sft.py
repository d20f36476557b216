"""``mcore-rl sft``: packed conversations through the engine, the loss on the assistant's turns alone."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mcore_rl.algorithms.cross_entropy import CrossEntropy
from mcore_rl.config.compose import as_dict
from mcore_rl.config.schedule import schedule_violations, scheduled
from mcore_rl.config.sft import ACTOR, SftConfig, sft_violations
from mcore_rl.controller.lifecycle.model_checks import adapter_violations, demand_weights, model_sft_violations
from mcore_rl.controller.lifecycle.model_directory import prepare_model
from mcore_rl.controller.lifecycle.preparation import (
    PreparedRun,
    to_resume,
    weights_of_roles,
    with_absolute_adapters,
)
from mcore_rl.controller.lifecycle.resume_check import Identity
from mcore_rl.controller.lifecycle.start_plan import forecast
from mcore_rl.controller.lifecycle.start_roles import start_roles
from mcore_rl.controller.programs.program import run_program, show_check
from mcore_rl.controller.step import updates
from mcore_rl.controller.step.utilization import Passes, tflop
from mcore_rl.controller.training_run import Callback, TrainingRun, begin_records, every_step, open_directory
from mcore_rl.data.conversations import Conversation, ConversationSet
from mcore_rl.data.sampler import PromptSampler
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.errors import refuse_if_any
from mcore_rl.families.config_json import read_config
from mcore_rl.families.registry import model_of
from mcore_rl.parallel.device import detect
from mcore_rl.parallel.secret_store import StoreServer
from mcore_rl.runtime.cluster import meeting_host
from mcore_rl.runtime.placement import place_trainers
from mcore_rl.runtime.seen_paths import demand_seen
from mcore_rl.runtime.train_group import TrainGroup
from mcore_rl.types import TrainBatch

SCORED_AT_ONCE = 1024  # validation conversations


@dataclass(kw_only=True)
class PreparedSft(PreparedRun):
    """What ``sft`` knows before it starts a process.  config: with absolute paths."""

    config: SftConfig
    train: ConversationSet
    validation: ConversationSet | None


def prepare(config: SftConfig) -> PreparedSft:
    """Reads the model's configuration, the tokenizer and the data.  Raises McoreRLError with every violation found."""
    refuse_if_any(sft_violations(config))
    place, path = Path(config.trainer.default_local_dir).resolve(), Path(config.model.path).resolve()
    config = replace(
        config,
        model=replace(config.model, path=str(path)),
        actor=with_absolute_adapters(config.actor),
        trainer=replace(config.trainer, default_local_dir=str(place)),
    )
    path = Path(config.model_directory)
    prepare_model(config.model, path)
    _, model = model_of(read_config(path))
    refuse_if_any([*model_sft_violations(config, model), *adapter_violations(config)])
    demand_weights(path, ACTOR.head)
    tokenizer, data, trainer = load_tokenizer(config.model.tokenizer_path or path), config.data, config.trainer
    files, title = data.train_files, "data.train_files"
    train = ConversationSet.load(files, data, tokenizer, max_samples=data.train_max_samples, title=title)
    validation = None
    if data.val_files:
        files, title = data.val_files, "data.val_files"
        validation = ConversationSet.load(files, data, tokenizer, max_samples=data.val_max_samples, title=title)
    sampler = PromptSampler(len(train), data.seed, data.shuffle)
    per_epoch = sampler.batches_per_epoch(data.train_batch_size)
    num_steps = 0 if trainer.val_only else trainer.total_training_steps or per_epoch * trainer.total_epochs
    refuse_if_any(list(schedule_violations(config, num_steps)))
    identity = Identity.of(as_dict(config), [role.name for role in config.role_rows], weights_of_roles(config))
    checkpoint, progress = to_resume(config, identity, sampler)
    return PreparedSft(
        config=scheduled(config, num_steps),
        train=train,
        validation=validation,
        sampler=sampler,
        progress=progress,
        checkpoint=checkpoint,
        identity=identity,
        models={ACTOR.name: model},
        num_steps=num_steps,
    )


async def run_sft(config: SftConfig, callbacks: Sequence[Callback] = ()) -> int:
    """Train, validate, save, export to ``RUN/hf/final``; returns the exit code of ``run_program``."""
    return await run_program(config, open_run, lambda run: every_step(run, train_step), callbacks)


def check_sft(config: SftConfig) -> int:
    """Read, check and plan all that a run needs, show the plan, and start nothing; returns the exit code 0."""
    prepared = prepare(config)
    show_check(prepared, forecast(prepared.config, detect(config.trainer.device), prepared.models))
    return 0


class SftRun(TrainingRun[SftConfig, PreparedSft]):
    """One run of ``mcore-rl sft``; made by ``open_run``.  num_tokens: in the batch of the last step."""

    num_tokens = 0

    @property
    def group(self) -> TrainGroup:
        """The workers of the one role that there is."""
        return self.groups[ACTOR.name]

    @property
    def validates_first(self) -> bool:
        """Whether it validates before the first step: a fresh run, or one that does nothing else."""
        trainer = self.config.trainer
        begins = trainer.val_before_train and self.progress.step == 0
        return self.prepared.validation is not None and (trainer.val_only or begins)

    async def validate(self, step: int) -> dict[str, float]:
        """``sft/val_loss``; nothing without validation data."""
        if self.prepared.validation is None:
            return {}
        with self.clock("validate"):
            return await _validate(self.prepared.validation, self.group)

    def rates(self, metrics: Mapping[str, float], seconds: Mapping[str, float]) -> dict[str, float]:
        """Tokens trained a second."""
        return {"perf/trained_tokens_per_s": self.num_tokens / seconds["time/update_actor"]}


@asynccontextmanager
async def open_run(config: SftConfig) -> AsyncIterator[SftRun]:
    """While open: all processes of the run are up, with their first weights.  Afterwards none is left."""
    prepared = prepare(config)
    config = prepared.config
    platform = detect(config.trainer.device)
    planned = forecast(config, platform, prepared.models)
    async with AsyncExitStack() as stack:
        tracker = open_directory(config, prepared, platform, stack, stack)
        tracker.now("starting the trainer")
        places = await place_trainers(config.trainer, platform)
        stack.callback(places.close)
        await demand_seen(weights_of_roles(config), places.nodes)
        store = stack.enter_context(StoreServer(meeting_host(config.ray_init))).access
        groups = await start_roles(config, prepared.checkpoint, places, platform, store, stack)
        begin_records(config, prepared, planned, tracker)
        run = SftRun(config, platform, tracker, prepared, groups)
        stack.push_async_callback(run.saver.close)
        yield run


async def train_step(run: SftRun, step: int) -> dict[str, float]:
    """Trains one optimizer step on the next conversations."""
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
    """``sft/val_loss``: the mean cross-entropy over the trained tokens of ``conversations``, nats."""
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
    """Packs ``conversations`` end to end.  Their first tokens are not trained, since nothing predicts them."""
    masks = [torch.tensor(each.mask) for each in conversations]
    for mask in masks:
        mask[0] = False
    return TrainBatch(
        lengths_S=tuple(len(each.tokens) for each in conversations),
        tokens_T=torch.tensor([token for each in conversations for token in each.tokens]),
        mask_T=torch.cat(masks),
    )
