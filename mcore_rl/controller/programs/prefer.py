"""``mcore-rl prefer``: pairs of answers through the engine, each pair in one microbatch; DPO and its relatives.

The reference is a snapshot of the first weights in the same processes (with adapters: of the first adapters), and
scores each step's answers before the update.  Validation takes the same losses of sums that both have scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mcore_rl.algorithms.advantages.ragged import sequence_counts
from mcore_rl.algorithms.preference import LABEL, MARGIN, WEIGHT, means, wins
from mcore_rl.algorithms.preference_losses import Responses, kto, pair_losses, rewards
from mcore_rl.config.prefer import ACTOR, REFERENCE, PreferConfig
from mcore_rl.config.preference import PreferenceConfig
from mcore_rl.config.role_table import REF_LOGPROBS
from mcore_rl.config.stages import TOKENS
from mcore_rl.controller.lifecycle.messages import warn
from mcore_rl.controller.programs.offline import Load, OfflineProgram, OfflineRun
from mcore_rl.controller.programs.sft import batch_of, result_metrics
from mcore_rl.controller.step import updates
from mcore_rl.data.conversations import Conversation
from mcore_rl.data.pairs import MEMBERS
from mcore_rl.data.preferences import PreferenceSet, PreferredAnswers, RowForm
from mcore_rl.data.tokenizer import end_tokens
from mcore_rl.data.turns import Turns
from mcore_rl.ground.types import SequenceScores, TrainBatch
from mcore_rl.runtime.shared_batch import SharedBatch

SCORED_AT_ONCE = 512  # validation rows


class PreferRun(OfflineRun[PreferConfig, PreferenceSet]):
    """One run of ``mcore-rl prefer``."""

    @property
    def preference(self) -> PreferenceConfig:
        """What is learnt from preferences."""
        return self.config.actor.preference

    async def judge(self, rows: PreferenceSet) -> dict[str, float]:
        """``prefer/val_*``: what ``judged`` says of all ``rows``, with the weights as they are."""
        responses = list[Responses]()
        rest = list[TrainBatch]()
        for start in range(0, len(rows), SCORED_AT_ONCE):
            batch = preference_batch([rows[index] for index in range(start, min(start + SCORED_AT_ONCE, len(rows)))])
            responses.append(await self.scored(batch))
            rest.append(batch)
        kl = 0.0
        if not self.preference.row.pairs:
            kl = await self.divergence([rows[index] for index in range(min(len(rows), SCORED_AT_ONCE))])
        joined = Responses(
            torch.cat([each.logprobs_R for each in responses]),
            torch.cat([each.ref_logprobs_R for each in responses if each.ref_logprobs_R is not None])
            if self.preference.row.reference
            else None,
            torch.cat([each.counts_R for each in responses]),
        )
        numbers = {name: torch.cat([batch.extra_S[name] for batch in rest]) for name in rest[0].extra_S}
        metrics = judged(joined, {name: x_S.double() for name, x_S in numbers.items()}, kl, self.preference)
        return {f"prefer/val_{name}": value for name, value in metrics.items()}

    async def scored(self, batch: TrainBatch) -> Responses:
        """The sums over the answers of ``batch``, float64, by the policy and, if the loss reads it, the reference."""
        group = self.group
        number = len(batch.lengths_S)
        shared = self.sent_to_score(batch)
        own = await updates.score(group, shared, ACTOR.scores("old_logprobs_T"))
        ref_S = (await self.refer(shared)).sums_S[:number] if self.preference.row.reference else None
        return Responses(own.sums_S[:number], ref_S, sequence_counts(batch.mask_T, batch.lengths_S).double())

    async def refer(self, shared: SharedBatch) -> SequenceScores:
        """Adds the reference's log-probs to ``shared``, and returns their sums."""
        return await updates.score(self.group, shared, REFERENCE.scores(REF_LOGPROBS))

    async def divergence(self, rows: Sequence[PreferredAnswers]) -> float:
        """KTO's estimate of ``KL(policy || reference)``, nats, not below 0 (arXiv:2402.01306, section 4.1).

        The mean log-ratio of answers that are not the prompt's own: see ``mismatched``.
        """
        limit = self.config.data.max_length
        mixed = [with_answer_of(own, other, limit) for own, other in mismatched(rows)]
        responses = await self.scored(batch_of(mixed))
        assert responses.ref_logprobs_R is not None, "kto has a reference"
        return max(0.0, float((responses.logprobs_R - responses.ref_logprobs_R).mean()))


def loader(config: PreferConfig, tokenizer: PreTrainedTokenizerBase) -> Load[PreferenceSet]:
    """Reads rows of preferences."""
    data, form = config.data, RowForm(labels=not config.actor.preference.row.pairs)
    ends = end_tokens(config.model_directory)
    encode = Turns.of(tokenizer, data.chat_template_kwargs, ends=ends, end_of_turn=data.end_of_turn).encode

    def load(files: Sequence[str], max_samples: int | None, title: str) -> PreferenceSet:
        rows = PreferenceSet.load(files, data, encode, max_samples=max_samples, title=title, form=form)
        rows.warn_of_equal(warn)
        return rows

    return load


async def train_step(run: PreferRun, step: int) -> dict[str, float]:
    """Trains one optimizer step on the next rows."""
    prepared = run.prepared
    group = run.group
    row = run.preference.row
    rows = [prepared.train[index] for index in prepared.sampler.next(run.config.data.train_batch_size)]
    batch = preference_batch(rows)
    loss = ACTOR.make_loss(run.config.actor)
    scored = 0.0
    shared = updates.send_whole(group, batch if row.pairs else replace(batch, pairs_S=None))
    if row.reference:
        with run.clock(REFERENCE.phase):
            await run.refer(shared)
            scored = 1.0
            if not row.pairs:
                loss = replace(loss, kl=await run.divergence(rows))
                scored = 3.0
    with run.clock(ACTOR.update_phase):
        number = len(rows) if row.pairs else len(batch.lengths_S)
        result = await updates.update_alone(group, shared, loss, float(number), (*TOKENS, REF_LOGPROBS))
    metrics = {f"prefer/{name}": value for name, value in means(result.metrics).items()}
    metrics |= {"prefer/loss": result.loss} | result_metrics(result)
    return metrics | ({} if row.pairs else {"prefer/kl": loss.kl}) | run.passes(batch.lengths_S, scored)


def preference_batch(rows: Sequence[PreferredAnswers]) -> TrainBatch:
    """All answers of ``rows`` end to end, with their pairs and numbers."""
    batch = batch_of([answer for row in rows for answer in row.answers])
    whole = [(key, row) for key, row in enumerate(rows) for _ in row.answers]
    labels = [label for row in rows for label in row.labels]
    return replace(
        batch,
        pairs_S=tuple(key if row.is_pair else None for key, row in whole),
        extra_S={
            MARGIN: torch.tensor([row.margin for _, row in whole]),
            WEIGHT: torch.tensor([row.weight for _, row in whole]),
            LABEL: torch.tensor([float(label != 0) for label in labels]),  # desirable or not,
        },
    )


def mismatched(rows: Sequence[PreferredAnswers]) -> list[tuple[Conversation, Conversation]]:
    """(an answer, one of the next row of another prompt) of every answer; of the next row where all have one prompt."""
    prompts = [row.answers[0].tokens[: row.answers[0].mask.index(True)] for row in rows]
    pairs = []
    for number, row in enumerate(rows):
        behind = [(number + step) % len(rows) for step in range(1, len(rows) + 1)]
        chosen = next((each for each in behind if prompts[each] != prompts[number]), behind[0])
        others = rows[chosen].answers
        pairs += [(own, others[place % len(others)]) for place, own in enumerate(row.answers)]
    return pairs


def with_answer_of(own: Conversation, other: Conversation, limit: int) -> Conversation:
    """The prompt of ``own``, up to its first trained token, and the answer of ``other``, cut to ``limit`` tokens."""
    prompt = own.mask.index(True)
    answer = other.mask.index(True)
    tokens = (*own.tokens[:prompt], *other.tokens[answer:])
    mask = ((False,) * prompt, other.mask[answer:])
    return Conversation(own.id, tokens[:limit], (*mask[0], *mask[1])[:limit])


def judged(responses: Responses, numbers: dict[str, Tensor], kl: float, config: PreferenceConfig) -> dict[str, float]:
    """Loss and metrics of all answers at once, as training has them of a step.

    responses: of both answers of each row, the preferred one first, or with kto of any.  numbers: margin, weight and
    label of each.
    """
    if config.row.pairs:
        first_P, second_P = torch.arange(len(responses.logprobs_R)).view(-1, MEMBERS).unbind(1)
        loss = pair_losses(responses.chosen(first_P), responses.chosen(second_P), numbers[MARGIN][first_P], config)
        loss = loss * numbers[WEIGHT][first_P]
    else:
        label_S = numbers[LABEL]
        first_P = (label_S > 0.5).nonzero().squeeze(1)
        second_P = (label_S <= 0.5).nonzero().squeeze(1)
        loss = kto(responses, label_S, kl, config) * numbers[WEIGHT]
    reward_S = rewards(responses, config)
    sums = dict[str, float]()
    for side, place_P in (("chosen", first_P), ("rejected", second_P)):
        sums[f"{side}_reward"] = float(reward_S[place_P].sum())
        sums[f"{side}_logprob"] = float(responses.logprobs_R[place_P].sum())
        sums[f"{side}_count"] = float(len(place_P))
    if config.row.pairs:
        sums["accuracy"] = float(wins(reward_S[first_P], reward_S[second_P]).sum())
    return {"loss": float(loss.mean())} | means(sums)


PREFER = OfflineProgram(loader, PreferRun, train_step)
