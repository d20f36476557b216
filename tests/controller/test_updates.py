"""Batches to shards and back: nothing is lost, swapped or counted twice on the way to the ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from mcore_rl.algorithms.policy import ActorLoss, policy_loss
from mcore_rl.config.parallel import parse_layout
from mcore_rl.config.roles import ActorConfig, LossAggregation
from mcore_rl.controller.updates import Updated, minibatches, score, send, update
from mcore_rl.parallel.layout import Layout
from mcore_rl.types import Denominators, StepResult, TokenScores, TrainBatch
from tests.support.batches import LENGTHS, ragged


class Ranks:
    """A worker group whose ranks answer from the tokens that they were sent."""

    def __init__(self, dp: int, silent: bool = False) -> None:
        self.layout = Layout.of(parse_layout(""), dp)
        self.silent = silent
        self.scored: list[TrainBatch] = []
        self.trained: list[tuple[list[TrainBatch], ActorLoss, Denominators, float, bool, str | None]] = []

    def put(self, shards: Sequence[object]) -> list[Any]:
        assert len(shards) == self.layout.dp
        return list(shards)

    async def map(self, method: str, places: Sequence[Any], *args: Any) -> list[Any]:
        if method == "score":
            self.arguments = args
            batches = [place.batch() for place in places]
            self.scored += batches
            return [TokenScores(logprobs_T=_says(batch), entropy_S=_sums(batch)) for batch in batches]
        loss, counts, *rest = args
        for number, each in enumerate(counts):
            batches = [place[number].batch() for place in places]
            self.trained.append((batches, loss, each, *rest))
        results = [
            StepResult(loss=1.0, grad_norm=2.0, lr=0.1, skipped=None, metrics={"actor/ratio": float(number)})
            for number in range(len(counts))
        ]
        return [results, *[None] * (self.layout.dp - 1)]


def _says(batch: TrainBatch) -> torch.Tensor:
    """Of each token, where it stands in its sequence, and how long that is: no two of ``LENGTHS`` are alike."""
    return torch.cat([torch.arange(n) + 1000 * n + 0.5 for n in batch.lengths_S]) + batch.tokens_T / 1024


def _sums(batch: TrainBatch) -> torch.Tensor:
    return torch.stack([part.double().sum() for part in torch.split(_says(batch), list(batch.lengths_S))])


@pytest.mark.parametrize("dp", [1, 2, 3, 10])
def test_scores_come_back_in_the_order_of_the_batch(dp: int) -> None:
    batch, group = ragged(101), Ranks(dp)
    found = asyncio.run(score(group, send(group, batch), temperature=0.7, with_entropy=True, snapshot="s"))  # type: ignore[arg-type]
    assert found.logprobs_T is not None and torch.equal(found.logprobs_T, _says(batch))
    assert found.entropy_S is not None and torch.equal(found.entropy_S, _sums(batch))
    assert found.values_T is None
    assert group.arguments == (0.7, True, "s")
    assert sorted(n for each in group.scored for n in each.lengths_S) == sorted(LENGTHS)
    sent = {name for each in group.scored for name, _ in each.token_fields()}
    assert sent == {"tokens_T", "mask_T"}, "what scoring does not read is not sent"


@pytest.mark.parametrize("dp", [1, 3])
def test_every_minibatch_is_trained_once_with_counts_of_all_ranks(dp: int) -> None:
    batch, group = ragged(101), Ranks(dp)
    loss, parts = policy_loss(ActorConfig()), [[0, 3, 4, 6, 9], [8, 1, 2, 5, 7]]
    done = asyncio.run(update(group, batch, loss, parts, temperature=0.5))  # type: ignore[arg-type]
    assert len(group.trained) == 2
    for members, (sent, sent_loss, counts, temperature, with_entropy, kl_to) in zip(parts, group.trained, strict=True):
        whole = batch.select(members)
        assert sorted(n for each in sent for n in each.lengths_S) == sorted(whole.lengths_S)
        assert counts == Denominators(
            loss=float(whole.mask_T.sum()), tokens=sum(whole.lengths_S), sequences=len(members)
        )
        assert (sent_loss, temperature, with_entropy, kl_to) == (loss, 0.5, False, None)
        tokens = torch.cat([each.tokens_T for each in sent]).sort().values
        assert torch.equal(tokens, whole.tokens_T.sort().values)
        together = torch.cat([each.advantages_T[each.mask_T] for each in sent])  # type: ignore[index]
        assert torch.equal(together.sort().values, whole.advantages_T[whole.mask_T].sort().values)  # type: ignore[index]
    assert done.trained == [int(batch.select(members).mask_T.sum()) for members in parts]
    assert [result.metrics["actor/ratio"] for result in done.results] == [0.0, 1.0]


def test_what_the_sum_is_divided_by_is_counted_over_the_minibatch() -> None:
    batch, group = ragged(101), Ranks(2)
    config = ActorConfig(loss_agg_mode=LossAggregation.sum_over_constant, loss_agg_constant=7.0, entropy_coeff=0.1)
    asyncio.run(update(group, batch, policy_loss(config), [[0, 2]], temperature=1.0))  # type: ignore[arg-type]
    ((_, _, counts, _, with_entropy, _),) = group.trained
    assert counts.loss == 2 * 7.0 and with_entropy


def test_a_minibatch_without_a_trained_token_is_left_out() -> None:
    batch, group = ragged(101), Ranks(1)  # sequence 3 is all masked
    parts = [[3], [0, 1]]
    done = asyncio.run(update(group, batch, policy_loss(ActorConfig()), parts, temperature=1.0))  # type: ignore[arg-type]
    assert len(group.trained) == len(done.results) == 1
    nothing = asyncio.run(update(group, batch, policy_loss(ActorConfig()), [[3]], temperature=1.0))  # type: ignore[arg-type]
    assert nothing.results == [] and nothing.mean("actor/ratio") is None


def test_minibatches_hold_whole_groups_in_order() -> None:
    group_S = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    assert minibatches(group_S, ActorConfig(ppo_mini_batch_size=2), 4, seed=1) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_later_passes_are_shuffled_by_the_seed() -> None:
    group_S = torch.arange(12).repeat_interleave(2)
    config = ActorConfig(ppo_mini_batch_size=4, ppo_epochs=3)
    found = minibatches(group_S, config, 12, seed=1)
    passes = [[each for part in found[start : start + 3] for each in part] for start in (0, 3, 6)]
    assert passes[0] == list(range(24))
    assert all(sorted(each) == list(range(24)) for each in passes)
    assert passes[1] != passes[0] and passes[2] != passes[1]
    assert all(part[2 * i] + 1 == part[2 * i + 1] for part in found for i in range(4)), "groups stay together"
    assert minibatches(group_S, config, 12, seed=1) == found != minibatches(group_S, config, 12, seed=2)
    straight = ActorConfig(ppo_mini_batch_size=4, ppo_epochs=2, shuffle=False)
    assert minibatches(group_S, straight, 12, seed=1) == found[:3] * 2


def test_metrics_are_means_over_trained_tokens() -> None:
    def result(**metrics: float) -> StepResult:
        return StepResult(loss=0.0, grad_norm=0.0, lr=0.0, skipped=None, metrics=metrics)

    done = Updated(results=[result(a=6.0, b=1.0), result(a=4.0)], trained=[3, 7])
    assert done.mean("a") == 1.0 and done.mean("a", first=True) == 2.0
    assert done.mean("b") == pytest.approx(1 / 3) and done.mean("c") is None
    assert done.sums() == {"a": 10.0, "b": 1.0}
