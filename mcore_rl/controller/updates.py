"""A role of a step: its log-probs or values over all data-parallel ranks, and its updates minibatch by minibatch.

The batch is the controller's; workers see shards of it, balanced by tokens.  What a sum is divided by is counted here,
over the whole minibatch, before anything is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mcore_rl.algorithms.losses.aggregation import loss_denominator
from mcore_rl.algorithms.policy import ActorLoss
from mcore_rl.algorithms.ragged import sequence_counts
from mcore_rl.algorithms.value import CriticLoss
from mcore_rl.config.roles import ActorConfig, CriticConfig
from mcore_rl.data.balance import balance, imbalance
from mcore_rl.runtime.shard import shards_of
from mcore_rl.runtime.worker_group import WorkerGroup
from mcore_rl.types import Denominators, StepResult, TokenScores, TrainBatch


@dataclass
class Updated:
    """Of one role in one step.  results: of each minibatch.  trained: its trained tokens."""

    results: list[StepResult] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)
    imbalance: float = 1.0

    def mean(self, name: str, first: bool = False) -> float | None:
        """A metric that losses sum over trained tokens, per trained token; first: of the first minibatch alone."""
        chosen = list(zip(self.results, self.trained, strict=True))[: 1 if first else None]
        found = [(result.metrics[name], count) for result, count in chosen if name in result.metrics]
        return sum(value for value, _ in found) / max(1, sum(count for _, count in found)) if found else None

    def sums(self) -> dict[str, float]:
        """All metrics, over all minibatches."""
        names = {name for result in self.results for name in result.metrics}
        return {name: sum(result.metrics.get(name, 0.0) for result in self.results) for name in names}


@dataclass(frozen=True, kw_only=True)
class Sent:
    """The tokens of a batch where workers read them.  shards: sequences of each data-parallel rank; places: of each."""

    lengths_S: tuple[int, ...]
    shards: list[list[int]]
    places: list[Any]


def send(group: WorkerGroup, batch: TrainBatch) -> Sent:
    """The tokens of ``batch``, for any ``score`` by ``group`` or another of as many data-parallel ranks."""
    plain = TrainBatch(lengths_S=batch.lengths_S, tokens_T=batch.tokens_T, mask_T=batch.mask_T)
    shards = balance(batch.lengths_S, group.layout.dp)
    return Sent(lengths_S=batch.lengths_S, shards=shards, places=group.put(shards_of(plain, shards)))


async def score(
    group: WorkerGroup,
    sent: Sent,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    snapshot: str | None = None,
) -> TokenScores:
    """What the role's model says of every token that was sent, in the batch's order; of entropy, sequences' sums."""
    found = await group.map("score", sent.places, temperature, with_entropy, snapshot)
    return TokenScores(
        logprobs_T=_of_tokens(sent, [scores.logprobs_T for scores in found]),
        values_T=_of_tokens(sent, [scores.values_T for scores in found]),
        entropy_S=_of_sequences(sent, [scores.entropy_S for scores in found]),
    )


async def update(
    group: WorkerGroup,
    batch: TrainBatch,
    loss: ActorLoss | CriticLoss,
    minibatches: Sequence[Sequence[int]],
    *,
    temperature: float,
    reference: str | None = None,
) -> Updated:
    """One optimizer step for each of ``minibatches``, lists of sequences of ``batch``; all in one call of the workers.

    One in which nothing is trained is left out.  reference: the snapshot to which a full KL is taken.
    """
    config, with_entropy = loss.config, isinstance(loss, ActorLoss) and loss.with_entropy
    kl_to = reference if isinstance(loss, ActorLoss) and loss.with_full_kl else None
    counts_S = sequence_counts(batch.mask_T, batch.lengths_S)
    planned = [_planned(batch, counts_S[list(members)], members, group.layout.dp, config) for members in minibatches]
    planned = [each for each in planned if each.trained]
    if not planned:
        return Updated()
    places = group.put(list(zip(*(shards_of(batch, each.shards) for each in planned), strict=True)))
    counts = [each.counts for each in planned]
    return Updated(
        results=(await group.map("train_steps", places, loss, counts, temperature, with_entropy, kl_to))[0],
        trained=[each.trained for each in planned],
        imbalance=max(imbalance(batch.lengths_S, each.shards) for each in planned),
    )


@dataclass(frozen=True, kw_only=True)
class _Minibatch:
    """shards: sequences of the batch, a list for each data-parallel rank.  trained: tokens."""

    shards: list[list[int]]
    counts: Denominators
    trained: int


def _planned(
    batch: TrainBatch, counts_S: Tensor, members: Sequence[int], num_ranks: int, config: ActorConfig | CriticConfig
) -> _Minibatch:
    """counts_S: trained tokens of each of ``members``."""
    lengths_S = [batch.lengths_S[index] for index in members]
    counts = Denominators(
        loss=loss_denominator(counts_S, config.loss_agg_mode, config.loss_agg_constant),
        tokens=sum(lengths_S),
        sequences=len(lengths_S),
    )
    shards = [[members[place] for place in shard] for shard in balance(lengths_S, num_ranks)]
    return _Minibatch(shards=shards, counts=counts, trained=int(counts_S.sum()))


def minibatches(group_S: Tensor, config: ActorConfig | CriticConfig, num_prompts: int, seed: int) -> list[list[int]]:
    """The sequences of each optimizer step: ``ppo_mini_batch_size`` prompts with all of their samples.

    group_S: the prompt of each sequence, 0 to ``num_prompts - 1``.  The first pass goes in the order of the prompts,
    later ones in orders drawn from ``seed``.
    """
    members: list[list[int]] = [[] for _ in range(num_prompts)]
    for sequence, group in enumerate(group_S.tolist()):
        members[group].append(sequence)
    generator, found = torch.Generator().manual_seed(seed), []
    for epoch in range(config.ppo_epochs):
        order = list(range(num_prompts))
        if epoch and config.shuffle:
            order = torch.randperm(num_prompts, generator=generator).tolist()
        for start in range(0, num_prompts, config.ppo_mini_batch_size):
            chosen = order[start : start + config.ppo_mini_batch_size]
            found.append([sequence for group in chosen for sequence in members[group]])
    return found


def _of_tokens(sent: Sent, parts: Sequence[Tensor | None]) -> Tensor | None:
    """The shards' per-token results back in the order of the batch."""
    pieces: dict[int, NDArray[Any]] = {}
    for shard, part in zip(sent.shards, parts, strict=True):
        if part is None:
            return None
        ends = np.cumsum([sent.lengths_S[index] for index in shard])
        pieces |= dict(zip(shard, np.split(part.numpy(), ends[:-1]), strict=True))
    return torch.from_numpy(np.concatenate([pieces[index] for index in range(len(pieces))]))


def _of_sequences(sent: Sent, parts: Sequence[Tensor | None]) -> Tensor | None:
    """The shards' per-sequence results back in the order of the batch."""
    found = [part for part in parts if part is not None]
    if not found:
        return None
    joined = torch.cat(found)
    in_order = torch.empty_like(joined)
    in_order[[index for shard in sent.shards for index in shard]] = joined
    return in_order
