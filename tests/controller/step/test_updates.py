"""Batches to ranks and back: nothing is lost, swapped or counted twice, whoever holds what."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from mcore_rl.algorithms.advantages.estimation import BatchAdvantages, Whitening
from mcore_rl.algorithms.advantages.ragged import Spreads, sequence_counts
from mcore_rl.algorithms.own_scores import OwnScores, own_scores
from mcore_rl.algorithms.policy import ActorLoss, policy_loss
from mcore_rl.algorithms.step_numbers import StepNumbers, finish
from mcore_rl.algorithms.token_advantages import Outcomes, compute_advantages
from mcore_rl.algorithms.value import CriticLoss, value_loss
from mcore_rl.config.compose import compose
from mcore_rl.config.role_table import ROLES
from mcore_rl.config.roles import CriticConfig, LossAggregation, RouterReplay
from mcore_rl.config.run import RunConfig
from mcore_rl.config.stages import Pass, StepStage, Update
from mcore_rl.controller.step.advantages import StepAdvantages
from mcore_rl.controller.step.updates import Updated, minibatches, run_pass, send, update
from mcore_rl.ground.types import Denominators, SequenceScores, StepResult, TokenScores, TrainBatch
from mcore_rl.runtime.shard import Shard, WorkerInput, WorkerOutput
from mcore_rl.runtime.shared_batch import SharedBatch
from mcore_rl.runtime.worker_values import TrainResults
from tests.support.batches import LENGTHS, ragged
from tests.support.in_process_group import InProcessGroup
from tests.support.settings import actor_config, algorithm_config

ALL = list(range(len(LENGTHS)))
PARTS = [[0, 3, 4, 6, 9], [8, 1, 2, 5, 7]]


class Ranks(InProcessGroup):
    """They answer from the tokens that they are handed."""

    def __init__(self, dp: int) -> None:
        super().__init__(dp, score=self._score, train=self._train)
        self.scored: list[TrainBatch] = []
        self.trained: dict[int, tuple[WorkerInput[Any], tuple[Any, ...]]] = {}

    def _score(
        self, rank: int, given: WorkerInput[None], makes: Sequence[str], *args: Any
    ) -> WorkerOutput[SequenceScores]:
        self.arguments = makes, *args
        (batch,) = given.batches
        self.scored.append(batch)
        routing_TLK = _routes(batch) if "routing_TLK" in makes else None
        return WorkerOutput(
            SequenceScores(sums_S=_sums(batch), entropy_S=-_sums(batch)),
            Shard.of(batch.lengths_S, **{makes[0]: _says(batch)}, routing_TLK=routing_TLK),
        )

    def _train(self, rank: int, given: WorkerInput[Any], *args: Any) -> WorkerOutput[TrainResults | None]:
        self.trained[rank] = given, args
        results = [
            StepResult(loss=1.0, grad_norm=2.0, lr=0.1, skipped=None, metrics={"actor/ratio": float(number)})
            for number in range(len(given.batches))
        ]
        with_scores, batch, own = args[6], given.batches[0], list[OwnScores]()
        if with_scores:  # of log-probs that each token says, as the engine returns them
            own = [own_scores(batch, TokenScores(logprobs_T=_says(batch), entropy_T=-_says(batch)))]
        return WorkerOutput(TrainResults(results if rank == 0 else [], [], own))


def _says(batch: TrainBatch) -> torch.Tensor:
    """Of each token, where it stands in its sequence, and how long that is: no two of ``LENGTHS`` are alike."""
    return torch.cat([torch.arange(n) + 1000 * n + 0.5 for n in batch.lengths_S]) + batch.tokens_T / 1024


def _routes(batch: TrainBatch) -> torch.Tensor:
    """Of each token, three layers and two experts that follow from what it says."""
    return (_says(batch)[:, None, None] * torch.tensor([[1, 3], [5, 7], [11, 13]])).to(torch.uint8)


def _sums(batch: TrainBatch) -> torch.Tensor:
    return torch.stack([part.double().sum() for part in torch.split(_says(batch), list(batch.lengths_S))])


def _step(
    batch: TrainBatch, advantages_S: torch.Tensor | None = None, whitening: Whitening | None = None
) -> StepAdvantages:
    estimate = BatchAdvantages(advantages_S=advantages_S, whitening=whitening, spread=None)
    return StepAdvantages(advantages=estimate, trained_S=sequence_counts(batch.mask_T, batch.lengths_S), metrics={})


async def _update(
    group: Ranks, shared: SharedBatch, loss: ActorLoss | CriticLoss, parts: Sequence[Sequence[int]],
    step: StepAdvantages, *, temperature: float, seed: int = 0, with_scores: bool = False,
) -> Updated:  # fmt: skip
    """With the settings of the loss, and what its role reads."""
    (stage,) = (each for each in _stages(*READ_BY[type(loss)]) if isinstance(each, Update))
    return await update(
        group, shared, loss, loss.config, parts, step,
        reads=stage.reads, temperature=temperature, seed=seed, with_scores=with_scores,
    )  # fmt: skip


# The role that a loss is of, and what lets it read most.
READ_BY = {
    ActorLoss: ("actor", "actor.router_replay=r2", "actor.use_kl_loss=true"),
    CriticLoss: ("critic", "algorithm=ppo"),
}


def _stages(role: str, *words: str) -> Sequence[StepStage]:
    run = compose(RunConfig, "train", ["model.path=m", *words])
    return ROLES[role].stages(ROLES[role], run)


def _plain(batch: TrainBatch) -> TrainBatch:
    return TrainBatch(lengths_S=batch.lengths_S, tokens_T=batch.tokens_T, mask_T=batch.mask_T)


@pytest.mark.parametrize("dp", [1, 2, 3, 10])
def test_sums_come_back_in_the_order_of_the_batch(dp: int) -> None:
    batch, group = ragged(101), Ranks(dp)
    shared = send(group, batch, [ALL])
    stage = replace(ROLES["actor"].scores("old_logprobs_T", "entropy_S"), weights="s")
    scores = asyncio.run(run_pass(group, shared, stage, temperature=0.7))
    assert scores is not None
    assert torch.equal(scores.sums_S, _sums(batch))
    assert scores.entropy_S is not None and torch.equal(scores.entropy_S, -_sums(batch))
    assert group.arguments == (("old_logprobs_T", "entropy_S"), 0.7, ["s"])
    assert sorted(n for each in group.scored for n in each.lengths_S) == sorted(LENGTHS)
    read = {name for each in group.scored for name, _ in each.token_fields()}
    assert read == {"tokens_T", "mask_T"}, "what scoring does not read is not taken"


@pytest.mark.parametrize("dp", [1, 3])
def test_recorded_experts_reach_every_update_of_the_policy(dp: int) -> None:
    batch, group = ragged(101), Ranks(dp)
    shared = send(group, _plain(batch), PARTS)
    asyncio.run(run_pass(group, shared, _stages("actor", "actor.router_replay=r2")[0]))
    parts = [[9, 1, 4, 0, 6], *PARTS[::-1], [2, 3, 4, 5, 8]]
    asyncio.run(_update(group, shared, policy_loss(actor_config()), parts, _step(batch), temperature=1.0))
    handed = [each for rank in range(dp) for each in group.trained[rank][0].batches]
    assert len(handed) == dp * len(parts)
    for each in handed:
        assert each.routing_TLK is not None and torch.equal(each.routing_TLK, _routes(each))
        assert each.unrouted_T is None


@pytest.mark.parametrize("mode", RouterReplay)
def test_experts_of_the_sampler_reach_the_policy_alone(mode: RouterReplay) -> None:
    batch, reads = ragged(101), {"tokens_T", "mask_T"}
    unrouted_T = torch.arange(batch.tokens_T.numel()) % 7 == 0
    reported = replace(_plain(batch), routing_TLK=_routes(batch), unrouted_T=unrouted_T)
    for role in ROLES.values():
        words = [f"actor.router_replay={mode.value}", "algorithm=prime", "process_reward.path=p"]
        (stage, *_) = (each for each in _stages(role.name, *words) if isinstance(each, Pass))
        for sent in (_plain(batch), reported):
            group = Ranks(2)
            shared = send(group, sent, [ALL])
            asyncio.run(run_pass(group, shared, stage))
            records = "routing_TLK" in group.arguments[0]
            assert records is (role.name == "actor" and mode is RouterReplay.r2), "who records"
            for each in group.scored:
                has = {name for name, _ in each.token_fields()}
                if role.name != "actor" or sent is not reported or mode is not RouterReplay.r3:
                    assert has == reads
                else:
                    assert has == reads | {"routing_TLK", "unrouted_T"}
                    assert each.routing_TLK is not None and torch.equal(each.routing_TLK, _routes(each))


@pytest.mark.parametrize(("dp", "scorers"), [(1, 1), (3, 3), (2, 5), (5, 1)])
def test_what_one_group_said_another_is_handed_with_the_tokens(dp: int, scorers: int) -> None:
    """Also where the two are of different sizes, and minibatches are not those that the tokens were laid out for."""
    batch, group, other = ragged(101), Ranks(dp), Ranks(scorers)
    shared = send(group, _plain(batch), PARTS)
    asyncio.run(run_pass(other, shared, ROLES["critic"].scores("old_values_T")))
    parts = [[9, 1, 4, 0, 6], *PARTS[::-1], [2, 3, 4, 5, 8]]
    loss = value_loss(CriticConfig(loss_agg_constant=9.0))
    asyncio.run(_update(group, shared, loss, parts, _step(batch), temperature=1.0))
    for number, members in enumerate(parts):
        given = [group.trained[rank][0].batches[number] for rank in range(dp) if rank in group.trained]
        assert sorted(n for each in given for n in each.lengths_S) == sorted(batch.select(members).lengths_S)
        for each in given:
            assert each.old_values_T is not None and torch.equal(each.old_values_T, _says(each))


@pytest.mark.parametrize("dp", [1, 3])
def test_every_minibatch_is_trained_once_with_counts_of_all_ranks(dp: int) -> None:
    batch, group = ragged(101), Ranks(dp)
    loss = policy_loss(actor_config())
    shared, advantages_S = send(group, batch, PARTS), torch.tensor(LENGTHS) + 0.25
    done = asyncio.run(_update(group, shared, loss, PARTS, _step(batch, advantages_S), temperature=0.5))
    for number, members in enumerate(PARTS):
        whole = batch.select(members)
        sent = [group.trained[rank][0].batches[number] for rank in range(dp)]
        assert sorted(n for each in sent for n in each.lengths_S) == sorted(whole.lengths_S)
        tokens = torch.cat([each.tokens_T for each in sent]).sort().values
        assert torch.equal(tokens, whole.tokens_T.sort().values)
        for rank, each in enumerate(sent):  # a sequence's own, which its length tells
            assert group.trained[rank][0].payload[number].tolist() == [n + 0.25 for n in each.lengths_S]
    (sent_loss, counts, *rest), whole = group.trained[0][1], batch.select(PARTS[1])
    assert (sent_loss, rest) == (loss, [0.5, False, None, None, False, StepNumbers()])
    assert counts[1] == Denominators(loss=float(whole.mask_T.sum()), tokens=sum(whole.lengths_S), sequences=5)
    assert done.trained == [int(batch.select(members).mask_T.sum()) for members in PARTS]
    assert [result.metrics["actor/ratio"] for result in done.results] == [0.0, 1.0]


def test_a_role_is_handed_what_its_loss_reads() -> None:
    batch, group = ragged(101), Ranks(2)
    shared, whitening = send(group, batch, PARTS), Whitening(0.5, 2.0)
    for loss, fields in (
        (policy_loss(actor_config()), {"old_logprobs_T", "ref_logprobs_T", "advantages_T"}),
        (value_loss(CriticConfig(loss_agg_constant=9.0)), {"old_values_T", "returns_T"}),
    ):
        step = _step(batch, whitening=whitening)
        asyncio.run(_update(group, shared, loss, PARTS, step, temperature=1.0))
        given, arguments = group.trained[1]
        there = {name for name, _ in batch.token_fields()}
        assert {name for name, _ in given.batches[0].token_fields()} == (fields | {"tokens_T", "mask_T"}) & there
        assert given.payload == [None, None] and arguments[-1] == StepNumbers(whitening=whitening)


def _scoring(group: Ranks, batch: TrainBatch, parts: Sequence[Sequence[int]]) -> Updated:
    step, loss = _step(batch, torch.zeros(len(LENGTHS))), policy_loss(actor_config())
    shared = send(group, replace(batch, old_logprobs_T=None), parts)
    return asyncio.run(_update(group, shared, loss, parts, step, temperature=1.0, with_scores=True))


@pytest.mark.parametrize("dp", [1, 3])
def test_an_update_that_scores_says_what_the_pass_and_the_advantages_would(dp: int) -> None:
    drawn_T = torch.rand(sum(LENGTHS), generator=torch.Generator().manual_seed(2))
    batch, group = replace(ragged(101), rollout_logprobs_T=drawn_T), Ranks(dp)
    own = _scoring(group, batch, [ALL]).own
    told = Outcomes(scores_S=torch.zeros(10), truncated_S=torch.zeros(10, dtype=torch.bool))
    _, expected = compute_advantages(replace(batch, old_logprobs_T=_says(batch)), told, algorithm_config(), 0.0)
    assert own is not None and expected.correction is not None
    for name, sums_S in vars(expected.correction).items():
        assert torch.equal(getattr(own.correction, name), sums_S), name
    trained_T = _says(batch).double() * batch.mask_T
    trained_S = torch.stack([part.sum() for part in trained_T.split(list(LENGTHS))])
    assert torch.allclose(own.scores.sums_S, trained_S, rtol=1e-12)
    assert own.scores.entropy_S is not None and torch.equal(own.scores.entropy_S, -own.scores.sums_S)
    (given, _), *_ = group.trained.values()
    assert given.batches[0].rollout_logprobs_T is not None and given.batches[0].old_logprobs_T is None


@pytest.mark.parametrize("dp", [1, 2, 3])
def test_where_the_sampler_s_log_probs_are_the_old_ones_the_first_minibatch_scores_itself(dp: int) -> None:
    drawn_T = torch.rand(sum(LENGTHS), generator=torch.Generator().manual_seed(2))
    batch, group = replace(ragged(101), rollout_logprobs_T=drawn_T, old_logprobs_T=drawn_T), Ranks(dp)
    shared, loss = send(group, batch, PARTS), policy_loss(actor_config())
    step = _step(batch, torch.zeros(len(LENGTHS)))
    updated = asyncio.run(_update(group, shared, loss, PARTS, step, temperature=1.0, with_scores=True))
    first = batch.select(sorted(PARTS[0]))
    assert updated.own is not None and first.rollout_logprobs_T is not None
    expected = own_scores(first, TokenScores(logprobs_T=_says(first), entropy_T=-_says(first)))
    assert torch.equal(updated.own.scores.sums_S, expected.scores.sums_S)
    for name, sums_S in vars(expected.correction).items():
        assert torch.equal(getattr(updated.own.correction, name), sums_S), name
    given, _ = group.trained[0]
    old_T, drawn_T = given.batches[0].old_logprobs_T, given.batches[0].rollout_logprobs_T
    assert old_T is not None and drawn_T is not None and torch.equal(old_T, drawn_T)


def test_the_second_update_of_a_batch_cannot_score_it() -> None:
    with pytest.raises(AssertionError, match="second update"):
        _scoring(Ranks(1), ragged(101), PARTS)


def test_what_the_sum_is_divided_by_is_counted_over_the_minibatch() -> None:
    batch, group = ragged(101), Ranks(2)
    config = actor_config(loss_agg_mode=LossAggregation.sum_over_constant, loss_agg_constant=7.0, entropy_coeff=0.1)
    loss, step = policy_loss(config), _step(batch)
    asyncio.run(_update(group, send(group, batch, [ALL]), loss, [[0, 2]], step, temperature=1.0))
    _, (sent_loss, (counts,), _, with_entropy, *_) = group.trained[0]
    assert isinstance(sent_loss, ActorLoss) and counts.loss == 2 * 7.0 and with_entropy


def test_a_minibatch_without_a_trained_token_is_left_out() -> None:
    batch, group = ragged(101), Ranks(1)  # sequence 3 is all masked
    shared, loss, step = send(group, batch, [ALL]), policy_loss(actor_config()), _step(batch)
    done = asyncio.run(_update(group, shared, loss, [[3], [0, 1]], step, temperature=1.0))
    assert len(group.trained[0][0].batches) == len(done.results) == 1
    nothing = asyncio.run(_update(group, shared, loss, [[3]], step, temperature=1.0))
    assert nothing.results == [] and nothing.sums.mean("actor/ratio") is None
    assert group.told == ["rest"], "a device that is shared is left all the same"


def test_minibatches_hold_whole_groups_in_order() -> None:
    group_S = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    assert minibatches(group_S, actor_config(ppo_mini_batch_size=2), 4, seed=1) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_later_passes_are_shuffled_by_the_seed() -> None:
    group_S = torch.arange(12).repeat_interleave(2)
    config = actor_config(ppo_mini_batch_size=4, ppo_epochs=3)
    parts = minibatches(group_S, config, 12, seed=1)
    passes = [[each for part in parts[start : start + 3] for each in part] for start in (0, 3, 6)]
    assert passes[0] == list(range(24))
    assert all(sorted(each) == list(range(24)) for each in passes)
    assert passes[1] != passes[0] and passes[2] != passes[1]
    assert all(part[2 * i] + 1 == part[2 * i + 1] for part in parts for i in range(4)), "groups stay together"
    assert minibatches(group_S, config, 12, seed=1) == parts != minibatches(group_S, config, 12, seed=2)
    straight = actor_config(ppo_mini_batch_size=4, ppo_epochs=2, shuffle=False)
    assert minibatches(group_S, straight, 12, seed=1) == parts[:3] * 2


def test_metrics_are_means_over_trained_tokens() -> None:
    def result(**metrics: float) -> StepResult:
        return StepResult(loss=0.0, grad_norm=0.0, lr=0.0, skipped=None, metrics=metrics)

    done = Updated(results=[result(a=6.0, b=1.0), result(a=4.0)], trained=[3, 7])
    sums = done.sums
    assert sums.mean("a") == 1.0 and sums.mean("a", first=True) == 2.0
    assert sums.mean("b") == pytest.approx(1 / 3) and sums.mean("c") is None
    assert sums.totals() == {"a": 10.0, "b": 1.0}


@pytest.mark.parametrize("dp", [1, 2])
def test_a_pair_is_trained_by_one_rank(dp: int) -> None:
    pairs_S = (11, 12, 13, 11, 14, 12, 14, None, 13, None)  # by key, both of a pair in one minibatch
    extra_S = {"margin_S": torch.tensor(LENGTHS) / 10}
    batch, group = replace(ragged(101), pairs_S=pairs_S, extra_S=extra_S), Ranks(dp)
    parts = [[0, 3, 4, 6], [8, 1, 2, 5, 7, 9]]
    shared = send(group, batch, parts)
    loss = policy_loss(actor_config())
    asyncio.run(_update(group, shared, loss, parts, _step(batch, torch.zeros(10)), temperature=1.0))
    for number, members in enumerate(parts):
        sent = [group.trained[rank][0].batches[number] for rank in range(dp)]
        keys = [each.pairs_S for each in sent]
        assert all(of_rank is not None and of_rank.count(key) == 2 for of_rank in keys for key in of_rank or () if key)
        by_length = dict(zip(LENGTHS, pairs_S, strict=True))
        for each in sent:
            assert each.pairs_S == tuple(by_length[length] for length in each.lengths_S)
            assert torch.equal(each.extra_S["margin_S"], torch.tensor(each.lengths_S) / 10)
            first = dict[int, int]()  # the preferred of a pair, wherever both were put
            for length, key in zip(each.lengths_S, each.pairs_S or (), strict=True):
                first.setdefault(key or -length, length)
            assert all(length == LENGTHS[pairs_S.index(key)] for key, length in first.items() if key > 0)
        assert sorted(n for each in sent for n in each.lengths_S) == sorted(LENGTHS[i] for i in members)


@pytest.mark.parametrize("taught", [False, True])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("mode", ["clip_cov", "kl_cov"])
def test_tokens_are_selected_over_the_whole_step_whoever_holds_them(mode: str, per_token: bool, taught: bool) -> None:
    """By hand over the whole batch; the same for one rank and for many, for one minibatch and for two."""
    batch, draw = ragged(101), torch.Generator().manual_seed(3)
    raw_T = torch.randn(len(batch.mask_T), generator=draw)
    batch = replace(batch, old_logprobs_T=2 * torch.randn(len(raw_T), generator=draw) - 3)
    batch = replace(batch, advantages_T=raw_T if per_token else None)
    if taught:
        batch = replace(batch, teacher_advantages_T=torch.randn(len(raw_T), generator=draw) + 1)
    advantages_S = torch.randn(len(LENGTHS), generator=draw)
    config = actor_config(loss_mode=mode, clip_cov_ratio=0.2, kl_cov_ratio=0.2, clip_cov_lb=0.1, clip_cov_ub=3.0)
    final_T = finish(batch, None if per_token else advantages_S.numpy(), StepNumbers()).advantages_T
    counts_S = sequence_counts(batch.mask_T, batch.lengths_S)
    assert final_T is not None and batch.old_logprobs_T is not None
    a_M, p_M = final_T[batch.mask_T].double(), batch.old_logprobs_T[batch.mask_T].double()
    covariance_M = (a_M - a_M.mean()) * (p_M - p_M.mean())
    estimate = BatchAdvantages(
        advantages_S=None if per_token else advantages_S, whitening=None, spread=Spreads.of(a_M, counts_S).total()
    )
    step = StepAdvantages(
        advantages=estimate, trained_S=counts_S, metrics={}, mean_advantage=float(a_M.mean()),
        mean_logprob=float(p_M.mean()),
    )  # fmt: skip
    count, chosen = int(0.2 * len(a_M)), set()
    for dp, parts in ((1, [ALL]), (1, PARTS), (3, PARTS), (10, [ALL])):
        group = Ranks(dp)
        shared = send(group, batch, parts)
        asyncio.run(_update(group, shared, policy_loss(config), parts, step, temperature=1.0, seed=5))
        selected_T = torch.zeros_like(batch.mask_T)
        for given, (*_, numbers) in group.trained.values():
            for part, given_S in zip(given.batches, given.payload, strict=True):
                part = finish(part, given_S, numbers)
                assert part.selection_T is not None
                for n, selection in zip(part.lengths_S, part.selection_T.split(list(part.lengths_S)), strict=True):
                    start = batch.offsets_S[LENGTHS.index(n)]  # no two lengths are alike
                    selected_T[start : start + n] = selection >= 0
        assert not selected_T[~batch.mask_T].any()
        chosen.add(tuple(selected_T.tolist()))
    assert len(chosen) == 1, "no layout and no minibatch changes what is selected"
    selected_M = selected_T[batch.mask_T]
    if mode == "kl_cov":
        assert int(selected_M.sum()) == count > 3
        assert covariance_M[selected_M].min() > covariance_M[~selected_M].max()
    else:
        assert int(selected_M.sum()) == count > 3
        assert ((0.1 < covariance_M) & (covariance_M < 3))[selected_M].all()
        assert not selected_M[((0.1 < covariance_M) & (covariance_M < 3))].all(), "some are drawn, not all taken"


def test_samples_of_a_prompt_go_to_one_rank() -> None:
    """Four prompts of 8 tokens with three answers of one token: apart 27 tokens a prompt, together 13."""
    prompts = [torch.arange(8) + 10 * number for number in range(4)]
    tokens = [torch.cat([prompt, torch.tensor([sample])]) for sample in range(3) for prompt in prompts]
    mask_T = torch.tensor(([False] * 8 + [True]) * 12)
    batch = TrainBatch(lengths_S=(9,) * 12, tokens_T=torch.cat(tokens), mask_T=mask_T, advantages_T=torch.ones(108))
    members, group = [list(range(12))], Ranks(2)
    shared = send(group, batch, members, share_prompts=True)
    assert all({index % 4 for index in rank} == {rank[0] % 4, rank[1] % 4} for rank in shared.assignment)
    assert not send(group, batch, members).stems
    loss = policy_loss(actor_config())
    updated = asyncio.run(_update(group, shared, loss, members, _step(batch), temperature=1.0))
    assert updated.imbalance == 1.0, "of what is computed: two prompts on each rank"
    assert [len(each[0].batches[0].lengths_S) for each in group.trained.values()] == [6, 6]
