"""``mcore-rl sft``: packed conversations through the engine, the loss on the assistant's turns alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from mcore_rl.algorithms.cross_entropy import CrossEntropy
from mcore_rl.config.sft import ACTOR, SftConfig
from mcore_rl.controller.lifecycle.model_checks import patch_violations
from mcore_rl.controller.programs.offline import Load, OfflineProgram, OfflineRun
from mcore_rl.controller.step import updates
from mcore_rl.controller.step.metrics import picture_metrics
from mcore_rl.controller.step.pixels import StepPictures, step_pictures
from mcore_rl.data.conversations import Conversation, ConversationSet
from mcore_rl.data.media.batch import with_pictures
from mcore_rl.data.media.prompts import picture_reader
from mcore_rl.data.tokenizer import end_tokens
from mcore_rl.families.config_json import read_config
from mcore_rl.families.registry import model_of
from mcore_rl.ground.errors import refuse_if_any
from mcore_rl.ground.types import StepResult, TrainBatch

SCORED_AT_ONCE = 1024  # validation conversations
SEEN_AT_ONCE = 128  # of those with pictures, whose pixels are in Ray's store meanwhile


class SftRun(OfflineRun[SftConfig, ConversationSet]):
    """One run of ``mcore-rl sft``."""

    async def judge(self, rows: ConversationSet) -> dict[str, float]:
        """``sft/val_loss``: the mean cross-entropy over the trained tokens of ``rows``, nats."""
        total = 0.0
        count = 0
        number = len(rows)
        group = self.group
        at_once = SCORED_AT_ONCE if rows.pictures is None else SEEN_AT_ONCE
        for start in range(0, number, at_once):
            chosen = {index: rows[index] for index in range(start, min(start + at_once, number))}
            conversations = list(chosen.values())
            while len(conversations) < group.layout.dp:  # every rank scores something
                first = conversations[0]  # what is there twice is not trained
                conversations.append(replace(first, mask=(False,) * len(first.mask)))
            batch = batch_of(conversations, pictures=rows.pictures is not None)
            shared = updates.send_whole(group, batch, await self.pictures_of(rows, chosen))
            total -= float((await updates.score(group, shared, ACTOR.scores("old_logprobs_T"))).sums_S.sum())
            count += int(batch.mask_T.sum())
        return {"sft/val_loss": total / count}

    async def pictures_of(self, rows: ConversationSet, chosen: Mapping[int, Conversation]) -> StepPictures | None:
        """The pictures of the ``chosen`` of ``rows``, in Ray's store; None: models are given none."""
        if rows.pictures is None:
            return None
        media = {number: each.media for number, each in chosen.items()}
        model = self.prepared.models[ACTOR.name]
        return await step_pictures(self.group, rows.patches, media, model, trained=self.config.actor.trains_tower)


def loader(config: SftConfig, tokenizer: PreTrainedTokenizerBase) -> Load[ConversationSet]:
    """Reads files as conversations."""

    directory = Path(config.model_directory)
    ends = end_tokens(directory)
    _, model = model_of(read_config(directory), pictures=config.sees_pictures)
    pictures = picture_reader(config.data, model)

    def load(files: Sequence[str], max_samples: int | None, title: str) -> ConversationSet:
        options: dict[str, Any] = {"max_samples": max_samples, "title": title, "ends": ends}
        rows = ConversationSet.load(files, config.data, tokenizer, pictures=pictures, **options)
        refuse_if_any(patch_violations(ACTOR.name, config.actor, rows.media))
        return rows

    return load


async def train_step(run: SftRun, step: int) -> dict[str, float]:
    """Trains one optimizer step on the next conversations."""
    prepared = run.prepared
    with run.clock(ACTOR.update_phase):
        train = prepared.train
        rows = prepared.sampler.next(run.config.data.train_batch_size)
        conversations = [train[index] for index in rows]
        batch = batch_of(conversations, pictures=train.pictures is not None)
        seen = await run.pictures_of(train, dict(zip(rows, conversations, strict=True)))
        shared = updates.send_whole(run.group, batch, seen)
        result = await updates.update_alone(run.group, shared, CrossEntropy(), float(batch.mask_T.sum()))
    needed = run.passes(batch.lengths_S, images_S=batch.images_S)
    return {"sft/loss": result.loss} | result_metrics(result) | needed | picture_metrics(batch)


def result_metrics(result: StepResult) -> dict[str, float]:
    """What every optimizer step says of itself."""
    routers = {name: value for name, value in result.metrics.items() if name.startswith("router/")}
    return routers | {
        "actor/grad_norm": result.grad_norm,
        "actor/lr": result.lr,
        "actor/skipped_updates": float(result.skipped is not None),
    }


def batch_of(conversations: Sequence[Conversation], *, pictures: bool = False) -> TrainBatch:
    """Packs ``conversations`` end to end.  Their first tokens are not trained, since nothing predicts them.

    pictures: whether the model is given theirs.
    """
    masks = [torch.tensor(each.mask) for each in conversations]
    for mask in masks:
        mask[0] = False
    batch = TrainBatch(
        lengths_S=tuple(len(each.tokens) for each in conversations),
        tokens_T=torch.tensor([token for each in conversations for token in each.tokens]),
        mask_T=torch.cat(masks),
    )
    return with_pictures(batch, [each.media for each in conversations]) if pictures else batch


SFT = OfflineProgram(loader, SftRun, train_step)
