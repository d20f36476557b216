"""Scores and updates a role in a step: log-probs or values over all data-parallel ranks, and minibatch updates.

The batch is in Ray's store (``runtime/shared_batch.py``), balanced by tokens over data-parallel ranks.  The divisors of
the losses' sums are counted here, over the whole minibatch, before anything is sent.

Of several teachers (``Teachers``) each scores its own sequences, in one call of the workers, in which they
take one teacher after the other: all ranks have some of every teacher's, since the ranks of a mixture of experts
compute a pass together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mcore_rl.algorithms.losses.aggregation import loss_denominator
from mcore_rl.algorithms.own_scores import OwnScores
from mcore_rl.algorithms.policy import ActorLoss
from mcore_rl.algorithms.role_loss import RoleLoss, UpdateSums
from mcore_rl.algorithms.selection import Moments, SequencesInStep, num_selected, select_tokens, threshold
from mcore_rl.algorithms.step_numbers import StepNumbers
from mcore_rl.config.algorithm_object import TEACHER
from mcore_rl.config.roles import ActorConfig, Teachers, TrainedConfig, snapshot_of
from mcore_rl.config.stages import INPUTS, TOKENS, Pass, is_field
from mcore_rl.controller.step.advantages import StepAdvantages
from mcore_rl.controller.step.pixels import StepPictures
from mcore_rl.data.balance import balance, imbalance
from mcore_rl.data.pairs import placed_whole, units_of
from mcore_rl.data.shared_prompts import Stem, dealt, loads, stems_of, within
from mcore_rl.ground.types import HIDDEN, TAUGHT_BY, Denominators, SequenceScores, StepResult, TrainBatch
from mcore_rl.parallel.device import Memory
from mcore_rl.runtime.shard import shards_of
from mcore_rl.runtime.shared_batch import SharedBatch
from mcore_rl.runtime.train_group import TrainGroup
from mcore_rl.runtime.worker_values import SequenceAdvantages

# The fields from which the keys of selection are computed.
SELECTION = (*TOKENS, "old_logprobs_T", "advantages_T", "teacher_advantages_T")


@dataclass
class Updated:
    """The updates of one role in one step.

    results: one per minibatch.
    memories: the memory use of each rank.
    trained: the trained tokens of each minibatch.
    imbalance: tokens of the busiest rank divided by the mean of the ranks, of the worst minibatch; those computed.
    shared: of the minibatches' tokens, the share that was not computed because a prompt was computed once.
    own: of the sequences of the first minibatch, in the order of the batch, if the update scored them.
    """

    results: list[StepResult] = field(default_factory=list)
    memories: list[Memory] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)
    imbalance: float = 1.0
    shared: float = 0.0
    own: OwnScores | None = None

    @property
    def sums(self) -> UpdateSums:
        """The metrics that the loss reported."""
        maxima = [result.maxima for result in self.results]
        return UpdateSums([result.metrics for result in self.results], self.trained, maxima)


def send(
    group: TrainGroup,
    batch: TrainBatch,
    minibatches: Sequence[Sequence[int]],
    pictures: StepPictures | None = None,
    *,
    share_prompts: bool = False,
) -> SharedBatch:
    """Puts ``batch`` into Ray's store, and assigns each sequence to the rank that trains it first in ``minibatches``.

    minibatches: those of ``group``.  Every sequence appears once in the first epoch; repeats are later epochs.
    pictures: those of ``batch``, where models are given some.
    share_prompts: samples of a prompt go to one rank where that leaves the busiest less to compute.
    """
    costs_S: Sequence[float] = batch.lengths_S
    if pictures is not None:
        of_pictures = [patches * pictures.patch_cost for patches in batch.patches_S]
        costs_S = [tokens + more for tokens, more in zip(batch.lengths_S, of_pictures, strict=True)]
    stems: list[Stem] = []
    if share_prompts and batch.pairs_S is None:
        stems = stems_of(batch.tokens_T.numpy(), batch.mask_T.numpy(), batch.lengths_S)
    assignment: list[list[int]] = [[] for _ in range(group.layout.dp)]
    seen: set[int] = set()
    for members in minibatches:
        if seen.isdisjoint(members):
            seen.update(members)
            of_ranks = _shards(batch, costs_S, members, group.layout.dp, stems)
            for sequences, shard in zip(assignment, of_ranks, strict=True):
                sequences.extend(shard)
    assert len(seen) == len(batch.lengths_S), "the first pass trains every sequence"
    shards = _together(assignment, group.neighbours)
    shared = SharedBatch(
        batch.lengths_S,
        assignment,
        batch.pairs_S,
        batch.extra_S,
        images_S=batch.images_S,
        patches=None if pictures is None else pictures.patches,
        costs_S=costs_S,
        stems=stems,
    )
    shared.add(shards, group.put(shards_of(batch, shards)), [name for name, _ in batch.token_fields()])
    return shared


def _together(assignment: Sequence[Sequence[int]], neighbours: Sequence[Sequence[int]]) -> list[list[int]]:
    """The sequences of each group of ``neighbours``, ranks that share a machine: one shard for all of them."""
    return [[sequence for rank in ranks for sequence in assignment[rank]] for ranks in neighbours]


async def run_pass(
    group: TrainGroup,
    shared: SharedBatch,
    stage: Pass,
    *,
    temperature: float = 1.0,
    teachers: Teachers | None = None,
    into: SharedBatch | None = None,
    share_prompts: bool = False,
) -> SequenceScores | None:
    """Runs a pass, which adds what it makes to ``shared``.

    group: the workers that it runs on.  temperature: of its log-probs.
    into: another batch with the same responses behind other prompts, which gets what the pass makes of them.
    teachers: of the run; of several, each scores its own sequences.
    share_prompts: whether the workers compute a prompt once for all of its samples.
    Returns sums per sequence; None where hidden states are made, or several teachers score.
    """
    if stage.role == TEACHER and teachers is not None and len(teachers.directories) > 1:
        await score_by_teacher(stage, group, shared, teachers, temperature)
        return None
    ranks = shared.assignment
    dp = group.layout.dp
    parted = bool(shared.stems) and not share_prompts  # the assignment is of ranks that share
    if len(ranks) != dp or parted or HIDDEN in stage.makes:  # hidden states are large: balanced by tokens
        deals = shared.stems and share_prompts
        ranks = dealt(shared.stems, shared.lengths_S, dp) if deals else balance(shared.costs_S, dp)
    lengths: list[Sequence[int] | None] = [None] * dp
    if into is not None:
        lengths = [[into.lengths_S[sequence] for sequence in members] for members in ranks]
    inputs = shared.shard_refs([[members] for members in ranks], stage.reads, lengths)
    sums, shards = await group.score(inputs, stage.makes, temperature=temperature, snapshots=[stage.weights])
    (into or shared).add(ranks, shards, [name for name in stage.makes if is_field(name)])
    return shared.in_order(ranks, sums) if sums else None


async def score(group: TrainGroup, shared: SharedBatch, stage: Pass) -> SequenceScores:
    """Runs a pass that makes log-probs, at temperature 1, or values; returns sums per sequence."""
    scores = await run_pass(group, shared, stage)
    assert scores is not None, f"{stage.role} makes {stage.makes[0]}"
    return scores


async def update(
    group: TrainGroup,
    shared: SharedBatch,
    loss: RoleLoss,
    config: TrainedConfig,
    minibatches: Sequence[Sequence[int]],
    step: StepAdvantages,
    *,
    reads: Sequence[str],
    temperature: float,
    reference: str | None = None,
    seed: int = 0,
    with_scores: bool = False,
    share_prompts: bool = False,
) -> Updated:
    """Takes one optimizer step for each of ``minibatches``, lists of sequences, in one call of the workers.

    A minibatch without trained tokens is skipped.

    reads: the fields that the loss receives, if the batch has them.
    reference: the snapshot to which a full KL is computed.
    seed: of the loss's random draws.
    share_prompts: as in ``run_pass``.
    with_scores: nothing has been scored, and the forward pass of the first minibatch does so
    (``config/step_plan.py``).
    """
    minibatches = [members for members in minibatches if int(step.trained_S[list(members)].sum())]
    if not minibatches:
        await group.rest()
        return Updated()
    counts = [_counts(shared.lengths_S, step.trained_S, members, config) for members in minibatches]
    stems = shared.stems if share_prompts else ()
    shards = [_shards(shared, shared.costs_S, members, group.layout.dp, stems) for members in minibatches]
    batches = list(zip(*shards, strict=True))
    numbers = StepNumbers(whitening=step.advantages.whitening, mean_weight=step.mean_weight)
    if isinstance(loss, ActorLoss):
        numbers = await _select_tokens(group, shared, loss.config, step, numbers, seed)
    payloads: list[SequenceAdvantages] = [[None] * len(minibatches)] * len(batches)
    if "advantages_T" in reads and step.advantages.advantages_S is not None:
        advantages_S = step.advantages.advantages_S.numpy()  # pickled faster than tensors
        payloads = [[advantages_S[sequences] for sequences in of_rank] for of_rank in batches]
    if with_scores:
        known = len(minibatches) == 1 or "old_logprobs_T" in shared
        assert known, "the second update of a batch needs the log-probs before the first"
        reads = (*reads, "rollout_logprobs_T")
    done = await group.train(
        shared.shard_refs(batches, reads, payloads),
        loss,
        counts,
        temperature=temperature,
        with_entropy=loss.with_entropy,
        kl_to=reference if loss.with_full_kl else None,
        distill=loss.distill,
        with_scores=with_scores,
        numbers=numbers,
    )
    return Updated(
        results=done.results,
        memories=done.memories,
        trained=[int(step.trained_S[list(members)].sum()) for members in minibatches],
        imbalance=max(_imbalance(shared.lengths_S, each, stems) for each in shards),
        shared=sum(result.saved_tokens for result in done.results) / sum(each.tokens for each in counts),
        own=shared.in_order(shards[0], done.scores) if with_scores else None,
    )


async def _select_tokens(
    group: TrainGroup, shared: SharedBatch, config: ActorConfig, step: StepAdvantages, numbers: StepNumbers, seed: int
) -> StepNumbers:
    """``numbers`` with the threshold, if the loss selects tokens; adds the tokens' keys to ``shared``."""
    count = num_selected(config, int(step.trained_S.sum()))
    if not count:
        return numbers
    moments = Moments(advantage=step.mean_advantage, logprob=step.mean_logprob, num_selected=count, seed=seed)
    ranks = shared.assignment
    of_response_S = step.advantages.advantages_S
    payloads = [
        SequencesInStep(None if of_response_S is None else of_response_S[sequences].numpy(), sequences)
        for sequences in ranks
    ]
    inputs = shared.shard_refs([[sequences] for sequences in ranks], SELECTION, payloads)
    made, shards = await group.on_ranks(inputs, select_tokens, config, numbers, moments)
    shared.add(ranks, shards, ["selection_T"])
    return replace(numbers, threshold=threshold([each["largest"] for each in made], count))


async def update_alone(
    group: TrainGroup, shared: SharedBatch, loss: RoleLoss, denominator: float, reads: Sequence[str] = INPUTS
) -> StepResult:
    """Takes one optimizer step on all of a batch that was sent whole.

    denominator: what the sum of the losses is divided by.  reads: the fields that the loss receives.
    """
    counts = Denominators(loss=denominator, tokens=sum(shared.lengths_S), sequences=len(shared.lengths_S))
    ranks = shared.assignment
    payloads: list[SequenceAdvantages] = [[None]] * len(ranks)
    inputs = shared.shard_refs([[sequences] for sequences in ranks], reads, payloads)
    return (await group.train(inputs, loss, [counts])).results[0]


def send_whole(group: TrainGroup, batch: TrainBatch, pictures: StepPictures | None = None) -> SharedBatch:
    """Puts ``batch`` into Ray's store, for one optimizer step on all of it."""
    return send(group, batch, [range(len(batch.lengths_S))], pictures)


def _shards(
    batch: TrainBatch | SharedBatch,
    costs_S: Sequence[float],
    members: Sequence[int],
    dp: int,
    stems: Sequence[Stem] = (),
) -> list[list[int]]:
    """Divides ``members`` over the data-parallel ranks, balanced by cost; a pair stays on one rank, and in order.

    stems: of the batch, where prompts are shared; the cost is then the tokens that are computed.
    """
    pairs_S = batch.pairs_S
    if stems:
        return dealt(within(stems, members), batch.lengths_S, dp)
    if pairs_S is not None:
        members = sorted(members)  # the preferred one of a pair is the first of the batch
    costs = [costs_S[index] for index in members]
    if pairs_S is None:
        shards = balance(costs, dp)
    else:
        units = units_of([pairs_S[index] for index in members])
        shards = placed_whole(costs, units, partial(balance, num_ranks=dp))
    return [[members[place] for place in shard] for shard in shards]


def _imbalance(lengths_S: Sequence[int], shards: Sequence[Sequence[int]], stems: Sequence[Stem]) -> float:
    """Tokens that the busiest rank computes over the mean."""
    if not stems:
        return imbalance(lengths_S, shards)
    return imbalance(loads(stems, lengths_S, shards), [[rank] for rank in range(len(shards))])


def _counts(lengths_S: Sequence[int], trained_S: Tensor, members: Sequence[int], config: TrainedConfig) -> Denominators:
    return Denominators(
        loss=loss_denominator(trained_S[list(members)], config.loss_agg_mode, config.loss_agg_constant),
        tokens=sum(lengths_S[index] for index in members),
        sequences=len(members),
    )


def minibatches(group_S: Tensor, config: TrainedConfig, num_prompts: int, seed: int) -> list[list[int]]:
    """The sequences of each optimizer step: ``ppo_mini_batch_size`` prompts with all of their samples.

    group_S: the prompt of each sequence, 0 to ``num_prompts - 1``.  The first epoch takes the prompts in order; later
    ones, with ``config.shuffle``, in orders drawn from ``seed``.
    """
    members: list[list[int]] = [[] for _ in range(num_prompts)]
    for sequence, group in enumerate(group_S.tolist()):
        members[group].append(sequence)
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for epoch in range(config.ppo_epochs):
        order = list(range(num_prompts))
        if epoch and config.shuffle:
            order = torch.randperm(num_prompts, generator=generator).tolist()
        for start in range(0, num_prompts, config.ppo_mini_batch_size):
            chosen = order[start : start + config.ppo_mini_batch_size]
            batches.append([sequence for group in chosen for sequence in members[group]])
    return batches


async def score_by_teacher(
    stage: Pass, group: TrainGroup, shared: SharedBatch, teachers: Teachers, temperature: float
) -> None:
    """Adds the log-probs or hidden states that the teachers make to the batch."""
    teacher_S = np.asarray(teachers.numbers)[shared.extra_S[TAUGHT_BY].astype(np.int64)]
    dp = group.layout.dp
    taught = assignments(shared.costs_S, teacher_S, dp)
    batches = [[of_ranks[rank] for of_ranks in taught.values()] for rank in range(dp)]
    same: list[Sequence[int] | None] = [None] * dp  # the fields are of the sequences that are scored
    inputs = shared.shard_refs(batches, stage.reads, same)
    snapshots = [snapshot_of(teacher) for teacher in taught]
    _, shards = await group.score(inputs, stage.makes, temperature=temperature, snapshots=snapshots)
    members = [[sequence for batch in of_rank for sequence in batch] for of_rank in batches]
    shared.add(members, shards, stage.makes)


def assignments(costs_S: Sequence[float], teacher_S: NDArray[np.int64], num_ranks: int) -> dict[int, list[list[int]]]:
    """For each teacher that has sequences, those that each rank scores with it, balanced by cost.

    Every rank has one or more: of a teacher with fewer sequences than ranks, some are scored more than once.
    """
    taught = dict[int, list[list[int]]]()
    for teacher in sorted(set(teacher_S.tolist())):
        own = np.flatnonzero(teacher_S == teacher).tolist()
        members = own + [own[number % len(own)] for number in range(len(own), num_ranks)]
        ranks = balance([costs_S[sequence] for sequence in members], num_ranks)
        taught[teacher] = [[members[place] for place in of_rank] for of_rank in ranks]
    return taught
