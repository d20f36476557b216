"""A role of a step: its log-probs or values over all data-parallel ranks, and its updates minibatch by minibatch.

The batch lies in Ray's store (``runtime/shared_batch.py``), balanced by tokens over data-parallel ranks.  What a sum is
divided by is counted here, over the whole minibatch, before anything is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from mcore_rl.algorithms.cross_entropy import CrossEntropy
from mcore_rl.algorithms.losses.aggregation import loss_denominator
from mcore_rl.algorithms.policy import ActorLoss
from mcore_rl.algorithms.selection import Moments, num_selected, threshold
from mcore_rl.algorithms.step_numbers import StepNumbers
from mcore_rl.algorithms.value import CriticLoss
from mcore_rl.config.roles import ActorConfig, CriticConfig
from mcore_rl.controller.step.advantages import StepAdvantages
from mcore_rl.data.balance import balance, imbalance
from mcore_rl.data.pairs import placed_whole, units_of
from mcore_rl.parallel.device import Memory
from mcore_rl.runtime.shard import shards_of
from mcore_rl.runtime.shared_batch import SharedBatch
from mcore_rl.runtime.train_group import TrainGroup
from mcore_rl.runtime.train_worker import SequenceAdvantages, SequencesInStep
from mcore_rl.types import Denominators, SequenceScores, StepResult, TrainBatch

TOKENS = ("tokens_T", "mask_T")
# What a role's loss may read, of what is there.
ACTOR = (*TOKENS, "old_logprobs_T", "ref_logprobs_T", "advantages_T", "weights_T", "selection_T")
SELECTION = (*TOKENS, "old_logprobs_T", "advantages_T")
CRITIC = (*TOKENS, "old_values_T", "returns_T")


@dataclass
class Updated:
    """Of one role in one step.  results: of each minibatch.  trained: its trained tokens.  memories: of the ranks."""

    results: list[StepResult] = field(default_factory=list)
    memories: list[Memory] = field(default_factory=list)
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


def send(group: TrainGroup, batch: TrainBatch, minibatches: Sequence[Sequence[int]]) -> SharedBatch:
    """``batch`` to where workers read it, each sequence to the rank that trains it in ``minibatches``.

    minibatches: ``group``'s.  Every sequence appears once in the first pass; repeats are of later passes.
    """
    assignment: list[list[int]] = [[] for _ in range(group.layout.dp)]
    seen: set[int] = set()
    for members in minibatches:
        if seen.isdisjoint(members):
            seen.update(members)
            for sequences, shard in zip(assignment, _shards(batch, members, group.layout.dp), strict=True):
                sequences.extend(shard)
    assert len(seen) == len(batch.lengths_S), "the first pass trains every sequence"
    shared, shards = SharedBatch(batch.lengths_S, assignment, batch.pairs_S), _together(assignment, group.neighbours)
    shared.add(shards, group.put(shards_of(batch, shards)), [name for name, _ in batch.token_fields()])
    return shared


def _together(assignment: Sequence[Sequence[int]], neighbours: Sequence[Sequence[int]]) -> list[list[int]]:
    """The sequences of the ranks that share a machine: their shard travels there once, and all of them read it."""
    return [[sequence for rank in ranks for sequence in assignment[rank]] for ranks in neighbours]


async def score(
    group: TrainGroup,
    shared: SharedBatch,
    field: str,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    snapshot: str | None = None,
) -> SequenceScores:
    """What the role's model says of every token, which stays with the batch as ``field``; sums of each sequence."""
    ranks, dp = shared.assignment, group.layout.dp
    if len(ranks) != dp:
        ranks = balance(shared.lengths_S, dp)
    inputs = shared.shard_refs([[members] for members in ranks], TOKENS, [None] * dp)
    found, shards = await group.score(
        inputs, field, temperature=temperature, with_entropy=with_entropy, snapshot=snapshot
    )
    shared.add(ranks, shards, [field])
    return shared.in_order(ranks, found)


async def update(
    group: TrainGroup,
    shared: SharedBatch,
    loss: ActorLoss | CriticLoss,
    minibatches: Sequence[Sequence[int]],
    step: StepAdvantages,
    *,
    temperature: float,
    reference: str | None = None,
    seed: int = 0,
) -> Updated:
    """One optimizer step for each of ``minibatches``, lists of sequences; all in one call of the workers.

    One in which nothing is trained is left out.
    reference: the snapshot to which a full KL is taken.
    seed: of what the loss draws.
    """
    config, of_actor = loss.config, isinstance(loss, ActorLoss)
    with_entropy = isinstance(loss, ActorLoss) and loss.with_entropy
    kl_to = reference if isinstance(loss, ActorLoss) and loss.with_full_kl else None
    minibatches = [members for members in minibatches if int(step.trained_S[list(members)].sum())]
    if not minibatches:
        await group.rest()
        return Updated()
    counts = [_counts(shared.lengths_S, step.trained_S, members, config) for members in minibatches]
    shards = [_shards(shared, members, group.layout.dp) for members in minibatches]
    batches = list(zip(*shards, strict=True))
    numbers = StepNumbers(whitening=step.advantages.whitening, mean_weight=step.mean_weight)
    if isinstance(loss, ActorLoss):
        numbers = await _select_tokens(group, shared, loss.config, step, numbers, seed)
    payloads: list[SequenceAdvantages] = [[None] * len(minibatches)] * len(batches)
    if of_actor and step.advantages.advantages_S is not None:
        advantages_S = step.advantages.advantages_S.numpy()  # pickled sooner than tensors
        payloads = [[advantages_S[sequences] for sequences in of_rank] for of_rank in batches]
    done = await group.train(
        shared.shard_refs(batches, ACTOR if of_actor else CRITIC, payloads),
        loss,
        counts,
        temperature=temperature,
        with_entropy=with_entropy,
        kl_to=kl_to,
        numbers=numbers,
    )
    return Updated(
        results=done.results,
        memories=done.memories,
        trained=[int(step.trained_S[list(members)].sum()) for members in minibatches],
        imbalance=max(imbalance(shared.lengths_S, each) for each in shards),
    )


async def _select_tokens(
    group: TrainGroup, shared: SharedBatch, config: ActorConfig, step: StepAdvantages, numbers: StepNumbers, seed: int
) -> StepNumbers:
    """``numbers``, with the threshold of a loss that selects tokens; their keys stay with ``shared``."""
    count, spread = num_selected(config, int(step.trained_S.sum())), step.advantages.spread
    if not count:
        return numbers
    assert spread is not None, "tokens that are trained have advantages"
    moments = Moments(advantage=spread.mean, logprob=step.mean_logprob, num_selected=count, seed=seed)
    ranks, of_response_S = shared.assignment, step.advantages.advantages_S
    payloads = [
        SequencesInStep(None if of_response_S is None else of_response_S[sequences].numpy(), sequences)
        for sequences in ranks
    ]
    inputs = shared.shard_refs([[sequences] for sequences in ranks], SELECTION, payloads)
    largest, shards = await group.select_tokens(inputs, config, numbers, moments)
    shared.add(ranks, shards, ["selection_T"])
    return replace(numbers, threshold=threshold(largest, count))


async def update_alone(group: TrainGroup, batch: TrainBatch, loss: CrossEntropy) -> StepResult:
    """One optimizer step on all of ``batch``, which needs nothing besides; a mean over trained tokens."""
    members = list(range(len(batch.lengths_S)))
    shared = send(group, batch, [members])
    counts = Denominators(
        loss=float(batch.mask_T.sum()), tokens=int(batch.tokens_T.numel()), sequences=len(batch.lengths_S)
    )
    ranks = shared.assignment
    payloads: list[SequenceAdvantages] = [[None]] * len(ranks)
    inputs = shared.shard_refs([[sequences] for sequences in ranks], TOKENS, payloads)
    return (await group.train(inputs, loss, [counts])).results[0]


def _shards(batch: TrainBatch | SharedBatch, members: Sequence[int], dp: int) -> list[list[int]]:
    """Of ``members``, those of each data-parallel rank; a pair is one rank's."""
    lengths = [batch.lengths_S[index] for index in members]
    if batch.pairs_S is None:
        shards = balance(lengths, dp)
    else:
        units = units_of([batch.pairs_S[index] for index in members])
        shards = placed_whole(lengths, units, partial(balance, num_ranks=dp))
    return [[members[place] for place in shard] for shard in shards]


def _counts(
    lengths_S: Sequence[int], trained_S: Tensor, members: Sequence[int], config: ActorConfig | CriticConfig
) -> Denominators:
    return Denominators(
        loss=loss_denominator(trained_S[list(members)], config.loss_agg_mode, config.loss_agg_constant),
        tokens=sum(lengths_S[index] for index in members),
        sequences=len(members),
    )


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
