"""``mcore-rl reward``: a model learns to score answers, from pairs, numbers or outcomes; pairs are in one microbatch.

The model is the engine's with a value head, and is exported as transformers' sequence classifier.  Validation takes the
same losses of the scores of all held-out answers, and says how well they are calibrated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mcore_rl.algorithms.preference import LABEL, MARGIN, WEIGHT
from mcore_rl.algorithms.reward_loss import (
    STEP_LABEL_T,
    calibration_error,
    correlation,
    losses,
    pair_calibration_error,
    score_sums,
)
from mcore_rl.config.reward_training import ACTOR, RewardLossConfig, RewardTrainingConfig
from mcore_rl.config.stages import TOKENS
from mcore_rl.controller.lifecycle.messages import warn
from mcore_rl.controller.programs.offline import Load, OfflineProgram, OfflineRun
from mcore_rl.controller.programs.sft import batch_of, result_metrics
from mcore_rl.controller.step import updates
from mcore_rl.data.pairs import MEMBERS
from mcore_rl.data.preferences import PreferredAnswers, RowForm
from mcore_rl.data.scored_answers import ScoredSet, encoder
from mcore_rl.data.steps import LabelledSteps, StepSet
from mcore_rl.families.config_json import read_config
from mcore_rl.ground.types import TrainBatch

SCORED_AT_ONCE = 512  # validation rows


class RewardRun(OfflineRun[RewardTrainingConfig, ScoredSet | StepSet]):
    """One run of ``mcore-rl reward``."""

    async def judge(self, rows: ScoredSet | StepSet) -> dict[str, float]:
        """``reward/val_*``: what ``judged`` says of all ``rows``, with the weights as they are.

        Of rows with labels of steps, each beginning of an answer that ends with a step is scored by itself.
        """
        scores = list[Tensor]()
        numbers = list[Mapping[str, Tensor]]()
        for start in range(0, len(rows), SCORED_AT_ONCE):
            read = [rows[index] for index in range(start, min(start + SCORED_AT_ONCE, len(rows)))]
            parts = [row.by_step if isinstance(row, LabelledSteps) else [row] for row in read]
            batch = score_batch([part for of_row in parts for part in of_row])
            scores.append(await self.scored(batch))
            numbers.append(batch.extra_S)
        joined = {name: torch.cat([each[name] for each in numbers]).double() for name in numbers[0]}
        metrics = judged(torch.cat(scores), joined, self.config.actor.reward)
        return {f"reward/val_{name}": value for name, value in metrics.items()}

    async def scored(self, batch: TrainBatch) -> Tensor:
        """The score of each answer of ``batch``, float64."""
        scores = await updates.score(self.group, self.sent_to_score(batch), ACTOR.scores("old_values_T"))
        return scores.sums_S[: len(batch.lengths_S)]


def loader(config: RewardTrainingConfig, tokenizer: PreTrainedTokenizerBase) -> Load[ScoredSet | StepSet]:
    """Reads rows of pairs, or of answers and their labels, or of steps and theirs."""
    data = config.data
    row = config.actor.reward.row
    form = RowForm(pairs=row.pairs, labels=not row.pairs, least=row.labels[0], most=row.labels[1])
    pad_token_id = read_config(Path(config.model_directory)).get("pad_token_id")
    encode = encoder(tokenizer, pad_token_id, data.chat_template_kwargs)

    def load(files: Sequence[str], max_samples: int | None, title: str) -> ScoredSet | StepSet:
        if data.step_labels_key is not None:
            return StepSet.load(files, data, tokenizer, pad_token_id=pad_token_id, max_samples=max_samples, title=title)
        rows = ScoredSet.load(files, data, encode, max_samples=max_samples, title=title, form=form)
        rows.warn_of_equal(warn)
        return rows

    return load


async def train_step(run: RewardRun, step: int) -> dict[str, float]:
    """Trains one optimizer step on the next rows."""
    prepared = run.prepared
    group = run.group
    loss = ACTOR.make_loss(run.config.actor)
    rows = [prepared.train[index] for index in prepared.sampler.next(run.config.data.train_batch_size)]
    if steps := [row for row in rows if isinstance(row, LabelledSteps)]:
        batch = step_batch(steps)
        count = sum(len(row.labels) for row in steps)
        labels = [STEP_LABEL_T]
    else:
        batch = score_batch([row for row in rows if not isinstance(row, LabelledSteps)])
        count = len(rows)
        labels = []
    with run.clock(ACTOR.update_phase):
        shared = updates.send_whole(group, batch)
        result = await updates.update_alone(group, shared, loss, float(count), (*TOKENS, *labels))
    metrics = {f"reward/{TRAINED.get(name, name)}": value for name, value in means(result.metrics).items()}
    return metrics | {"reward/loss": result.loss} | result_metrics(result) | run.passes(batch.lengths_S)


# ``reward/accuracy`` is that of a policy's responses, in ``mcore-rl train``.
TRAINED = {"accuracy": "train_accuracy"}


def score_batch(rows: Sequence[PreferredAnswers]) -> TrainBatch:
    """All answers of ``rows`` end to end, with their pairs and numbers."""
    answers = [(key, row, label) for key, row in enumerate(rows) for label in row.labels]
    return replace(
        batch_of([answer for row in rows for answer in row.answers]),
        pairs_S=tuple(key for key, _, _ in answers) if rows[0].is_pair else None,
        extra_S={
            MARGIN: torch.tensor([row.margin for _, row, _ in answers]),
            WEIGHT: torch.tensor([row.weight for _, row, _ in answers]),
            LABEL: torch.tensor([label for _, _, label in answers]),
        },
    )


def step_batch(rows: Sequence[LabelledSteps]) -> TrainBatch:
    """All answers of ``rows`` end to end, with the label of each step at its trained token."""
    batch = batch_of([row.answer for row in rows])
    label_T = torch.zeros(len(batch.mask_T))
    label_T[batch.mask_T] = torch.tensor([label for row in rows for label in row.labels])
    return replace(batch, extra_T={STEP_LABEL_T: label_T}, extra_S={WEIGHT: torch.tensor([row.weight for row in rows])})


def means(sums: Mapping[str, float]) -> dict[str, float]:
    """Of ``score_sums``, the means over pairs or answers that are metrics."""
    names = ("accuracy", "chosen_score", "rejected_score", "score")
    metrics = {name: sums[name] / sums["count"] for name in names if name in sums}
    if "chosen_score" in metrics:
        metrics["margin"] = metrics["chosen_score"] - metrics["rejected_score"]
    return metrics


def judged(score_S: Tensor, numbers: Mapping[str, Tensor], config: RewardLossConfig) -> dict[str, float]:
    """Loss, metrics and calibration of the scores of all answers at once; those of a pair stand together.

    numbers: margin, weight and label of each answer.
    """
    first_U = torch.arange(len(score_S))
    second_U = None
    if config.row.pairs:
        first_U, second_U = first_U.view(-1, MEMBERS).unbind(1)
    sums = score_sums(score_S, first_U, second_U, numbers, config, torch.ones_like(score_S))
    metrics = means({name: float(value) for name, value in sums.items()})
    metrics["loss"] = float(losses(score_S, first_U, second_U, numbers, config).mean())
    if second_U is not None:
        metrics["ece"] = pair_calibration_error(score_S[first_U] - score_S[second_U])
    elif config.row.probabilities:
        metrics["ece"] = calibration_error(torch.sigmoid(score_S), numbers[LABEL])
    else:
        metrics["correlation"] = correlation(score_S, numbers[LABEL])
    return metrics


REWARD = OfflineProgram(loader, RewardRun, train_step)
