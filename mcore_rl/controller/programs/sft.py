"""``mcore-rl sft``: packed conversations through the engine, the loss on the assistant's turns alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from mcore_rl.algorithms.cross_entropy import CrossEntropy
from mcore_rl.config.sft import ACTOR, SftConfig
from mcore_rl.controller.programs.offline import Load, OfflineProgram, OfflineRun
from mcore_rl.controller.step import updates
from mcore_rl.data.conversations import Conversation, ConversationSet
from mcore_rl.data.media.prompts import picture_reader
from mcore_rl.data.tokenizer import end_tokens
from mcore_rl.families.config_json import read_config
from mcore_rl.families.registry import model_of
from mcore_rl.types import StepResult, TrainBatch

SCORED_AT_ONCE = 1024  # validation conversations


class SftRun(OfflineRun[SftConfig, ConversationSet]):
    """One run of ``mcore-rl sft``."""

    async def judge(self, rows: ConversationSet) -> dict[str, float]:
        """``sft/val_loss``: the mean cross-entropy over the trained tokens of ``rows``, nats."""
        total, count, number, group = 0.0, 0, len(rows), self.group
        for start in range(0, number, SCORED_AT_ONCE):
            chosen = [rows[index] for index in range(start, min(start + SCORED_AT_ONCE, number))]
            while len(chosen) < group.layout.dp:  # every rank scores something; what is there twice is not trained
                chosen.append(replace(chosen[0], mask=(False,) * len(chosen[0].mask)))
            batch = batch_of(chosen)
            shared = updates.send_whole(group, batch)
            total -= float((await updates.score(group, shared, ACTOR.scores("old_logprobs_T"))).sums_S.sum())
            count += int(batch.mask_T.sum())
        return {"sft/val_loss": total / count}


def loader(config: SftConfig, tokenizer: PreTrainedTokenizerBase) -> Load[ConversationSet]:
    """Reads files as conversations."""

    directory = Path(config.model_directory)
    ends = end_tokens(directory)
    _, model = model_of(read_config(directory), pictures=config.sees_pictures)
    pictures = picture_reader(config.data, model)

    def load(files: Sequence[str], max_samples: int | None, title: str) -> ConversationSet:
        options: dict[str, Any] = {"max_samples": max_samples, "title": title, "ends": ends}
        return ConversationSet.load(files, config.data, tokenizer, pictures=pictures, **options)

    return load


async def train_step(run: SftRun, step: int) -> dict[str, float]:
    """Trains one optimizer step on the next conversations."""
    prepared = run.prepared
    with run.clock(ACTOR.update_phase):
        rows = prepared.sampler.next(run.config.data.train_batch_size)
        batch = batch_of([prepared.train[index] for index in rows])
        shared = updates.send_whole(run.group, batch)
        result = await updates.update_alone(run.group, shared, CrossEntropy(), float(batch.mask_T.sum()))
    return {"sft/loss": result.loss} | result_metrics(result) | run.passes(batch.lengths_S)


def result_metrics(result: StepResult) -> dict[str, float]:
    """What every optimizer step says of itself."""
    routers = {name: value for name, value in result.metrics.items() if name.startswith("router/")}
    return routers | {
        "actor/grad_norm": result.grad_norm,
        "actor/lr": result.lr,
        "actor/skipped_updates": float(result.skipped is not None),
    }


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


SFT = OfflineProgram(loader, SftRun, train_step)
