"""A role of a step: its log-probs or values over all data-parallel ranks, and its updates minibatch by minibatch.

The batch is the controller's; workers see shards of it, balanced by tokens.  What a sum is divided by is counted here,
over the whole minibatch, before anything is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mcore_rl.algorithms.losses.aggregation import loss_denominator
from mcore_rl.algorithms.policy import ActorLoss
from mcore_rl.algorithms.value import CriticLoss
from mcore_rl.config.roles import ActorConfig, CriticConfig
from mcore_rl.data.balance import balance, imbalance
from mcore_rl.runtime.shard import shards_of
from mcore_rl.runtime.worker_group import WorkerGroup
from mcore_rl.types import Denominators, StepResult, TokenScores, TrainBatch


@dataclass
class Updated:
    """Of one role in one step.  results: of each minibatch.  trained: its trained tokens.  num_tokens: in all."""

    results: list[StepResult] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)
    num_tokens: int = 0
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


async def score(
    group: WorkerGroup,
    batch: TrainBatch,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    snapshot: str | None = None,
) -> TokenScores:
    """What the role's model says of every token of ``batch``, in its order."""
    plain = TrainBatch(lengths_S=batch.lengths_S, tokens_T=batch.tokens_T, mask_T=batch.mask_T)
    shards = balance(batch.lengths_S, group.layout.dp)
    places = group.put(shards_of(plain, shards))
    found = await group.map("score", places, temperature, with_entropy, snapshot)
    return TokenScores(
        logprobs_T=_in_place(batch, shards, [scores.logprobs_T for scores in found]),
        entropy_T=_in_place(batch, shards, [scores.entropy_T for scores in found]),
        values_T=_in_place(batch, shards, [scores.values_T for scores in found]),
    )


async def update(
    group: WorkerGroup,
    batch: TrainBatch,
    loss: ActorLoss | CriticLoss,
    minibatches: Sequence[Sequence[int]],
    *,
    temperature: float,
) -> Updated:
    """One optimizer step for each of ``minibatches``, lists of sequences of ``batch``.

    One in which nothing is trained is left out.  A rank is sent its sequences of all of them at once.
    """
    done, config = Updated(), loss.config
    with_entropy = isinstance(loss, ActorLoss) and loss.with_entropy
    planned = [_planned(batch, members, group.layout.dp, config) for members in minibatches]
    planned = [each for each in planned if each.trained]
    sent = [shards_of(batch, each.shards) for each in planned]
    places = group.put(list(zip(*sent, strict=True))) if sent else []
    for number, each in enumerate(planned):
        results = await group.map("train_step", places, number, loss, each.counts, temperature, with_entropy)
        done.results.append(results[0])
        done.trained.append(each.trained)
        done.num_tokens += each.counts.tokens
        done.imbalance = max(done.imbalance, imbalance(batch.lengths_S, each.shards))
    return done


@dataclass(frozen=True, kw_only=True)
class _Minibatch:
    """shards: sequences of the batch, a list for each data-parallel rank.  trained: tokens."""

    shards: list[list[int]]
    counts: Denominators
    trained: int


def _planned(
    batch: TrainBatch, members: Sequence[int], num_ranks: int, config: ActorConfig | CriticConfig
) -> _Minibatch:
    lengths_S = [batch.lengths_S[index] for index in members]
    masks = torch.split(batch.mask_T, list(batch.lengths_S))
    mask_T = torch.cat([masks[index] for index in members])
    counts = Denominators(
        loss=loss_denominator(mask_T, lengths_S, config.loss_agg_mode, config.loss_agg_constant),
        tokens=sum(lengths_S),
        sequences=len(lengths_S),
    )
    shards = [[members[place] for place in shard] for shard in balance(lengths_S, num_ranks)]
    return _Minibatch(shards=shards, counts=counts, trained=int(mask_T.sum()))


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


def _in_place(batch: TrainBatch, shards: Sequence[Sequence[int]], parts: Sequence[Tensor | None]) -> Tensor | None:
    """The shards' per-token results back in the order of ``batch``."""
    if any(part is None for part in parts):
        return None
    pieces: dict[int, Tensor] = {}
    for shard, part in zip(shards, parts, strict=True):
        assert part is not None
        lengths = [batch.lengths_S[index] for index in shard]
        pieces |= dict(zip(shard, torch.split(part, lengths), strict=True))
    return torch.cat([pieces[index] for index in range(len(batch.lengths_S))])
