"""Every rank's microbatches, rank by rank in one process; what ranks must agree on, in two."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist

from mcore_rl.config.engine import Dispatcher, MoeTrainConfig
from mcore_rl.config.parallel import parse_layout
from mcore_rl.ground.errors import ConfigError
from mcore_rl.ground.types import TokenScores, TrainBatch
from mcore_rl.parallel.groups import ProcessGroups
from mcore_rl.parallel.launch import Rank
from mcore_rl.parallel.layout import Layout
from mcore_rl.training.microbatch import NOWHERE, Microbatch, build_microbatches
from tests.support import batches, engines, models
from tests.support.forked import run_ranks

LAYOUTS = ["", "tp=2", "cp=2", "tp=2,cp=2", "cp=4", "tp=4", "pp=2", "pp=2,cp=2", "pp=2,vpp=2", "pp=3,vpp=2,tp=2"]
SIZES = [(64, None), (32, None), (4096, None), (None, 1), (None, 3), (None, 4), (None, 100)]


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """A process group of this process alone: the data-parallel group of a replica that has no other beside it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def ranks_of(layout: str) -> Iterator[ProcessGroups]:
    """What each rank of one model replica would be told; only the data-parallel group is real."""
    parallel, itself = parse_layout(layout), dist.group.WORLD
    shape = Layout.of(parallel, parallel.tp * parallel.pp * parallel.cp)
    for rank in range(shape.world_size):
        yield ProcessGroups(
            layout=shape, rank=rank, coords=shape.coords(rank), device=torch.device("cpu"),
            tp=itself, pp=itself, cp=itself, dp=itself, dp_cp=itself, experts=itself, etp=itself,
            moe_tokens=itself,
        )  # fmt: skip


def cut(batch: TrainBatch, groups: ProcessGroups, tokens: int | None, sequences: int | None) -> list[Microbatch]:
    return build_microbatches(batch, groups, tokens=tokens, sequences=sequences, equal_over_experts=False)


def small() -> TrainBatch:
    """Three sequences of 3, 1 and 2 tokens; token ``t`` is ``10 + t``."""
    mask_T = torch.tensor([0, 1, 1, 0, 0, 1], dtype=torch.bool)
    return TrainBatch(lengths_S=(3, 1, 2), tokens_T=torch.arange(10, 16), mask_T=mask_T)


# ---- by hand ----


def test_packed_by_hand() -> None:
    (groups,) = ranks_of("")
    (microbatch,) = cut(small(), groups, 8, None)
    assert microbatch.tokens.tolist() == [[10, 11, 12, 13, 14, 15]]
    assert microbatch.position_ids.tolist() == [[0, 1, 2, 0, 0, 1]]
    assert microbatch.labels_N.tolist() == [11, 12, 0, 0, 15, 0]
    assert microbatch.sources_N.tolist() == [0, 1, 2, 3, 4, 5]
    assert microbatch.targets_N.tolist() == [1, 2, NOWHERE, NOWHERE, 5, NOWHERE]
    assert microbatch.sequence_N.tolist() == [0, 0, 0, 1, 2, 2]
    assert microbatch.router_rows_M.tolist() == [0, 1, 2, 3, 4, 5]
    assert (microbatch.width, microbatch.lengths) == (6, (3, 1, 2))
    assert microbatch.packed is not None and microbatch.packed.cu_seqlens_q.tolist() == [0, 3, 4, 6]
    mask_N = microbatch.at_targets(small().mask_T)
    assert mask_N is not None and mask_N.tolist() == [True, True, False, False, True, False]
    out_T = torch.zeros(7)
    microbatch.scatter_to_targets(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), out_T)
    assert out_T[:6].tolist() == [0.0, 1.0, 2.0, 0.0, 0.0, 5.0]


def test_packed_over_two_context_ranks_by_hand() -> None:
    """Each sequence is padded to 4 and cut into 4 chunks of one token; rank 0 has the outer two, rank 1 the inner."""
    (first,), (second,) = (cut(small(), groups, 12, None) for groups in ranks_of("cp=2"))
    assert first.sources_N.tolist() == [0, NOWHERE, 3, NOWHERE, 4, NOWHERE]
    assert second.sources_N.tolist() == [1, 2, NOWHERE, NOWHERE, 5, NOWHERE]
    assert first.targets_N.tolist() == [1, NOWHERE, NOWHERE, NOWHERE, 5, NOWHERE]
    assert second.targets_N.tolist() == [2, NOWHERE, NOWHERE, NOWHERE, NOWHERE, NOWHERE]
    assert first.position_ids.tolist() == [[0, 3, 0, 3, 0, 3]]
    assert second.position_ids.tolist() == [[1, 2, 1, 2, 1, 2]]
    assert first.labels_N.tolist() == [11, 0, 0, 0, 15, 0]
    assert first.sequence_N.tolist() == [0, NOWHERE, 1, NOWHERE, 2, NOWHERE]
    assert second.sequence_N.tolist() == [0, 0, NOWHERE, NOWHERE, 2, NOWHERE]
    assert first.width == second.width == 12


def test_unpacked_over_two_tensor_ranks_by_hand() -> None:
    """One row a sequence, padded to 4 so that positions 0 and 1 go to the routers of rank 0, 2 and 3 to rank 1's."""
    (first,), (second,) = (cut(small(), groups, None, 3) for groups in ranks_of("tp=2"))
    for microbatch in (first, second):
        assert microbatch.tokens.tolist() == [[10, 11, 12, 0], [13, 0, 0, 0], [14, 15, 0, 0]]
        assert microbatch.sequence_N.tolist() == [0, 0, 0, -1, 1, -1, -1, -1, 2, 2, -1, -1]
        assert microbatch.packed is None
    assert first.router_rows_M.tolist() == [0, 4, 8, 1, 5, 9]
    assert second.router_rows_M.tolist() == [2, 6, 10, 3, 7, 11]


def test_the_last_packed_sequence_takes_the_padding() -> None:
    for groups in ranks_of("tp=4"):
        (microbatch,) = cut(small(), groups, 8, None)
        assert microbatch.tokens.tolist() == [[10, 11, 12, 13, 14, 15, 0, 0]]
        assert microbatch.position_ids.tolist() == [[0, 1, 2, 0, 0, 1, 2, 3]]
        assert microbatch.packed is not None
        assert microbatch.packed.lengths == (3, 1, 2) and microbatch.packed.padded_lengths == (3, 1, 4)
        assert microbatch.router_rows_M.tolist() == [2 * groups.coords.tp, 2 * groups.coords.tp + 1]


def test_fields_come_as_their_own_type_and_zero_where_nothing_is_predicted() -> None:
    (groups,) = ranks_of("")
    (microbatch,) = cut(small(), groups, None, 3)
    field_N = microbatch.at_targets(torch.arange(6) + 0.5)
    assert field_N is not None and field_N.tolist() == [1.5, 2.5, 0, 0, 0, 0, 5.5, 0, 0]
    assert microbatch.at_targets(None) is None


# ---- what holds for every rank, layout and size ----


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("tokens", "sequences"), SIZES)
def test_every_token_is_read_and_predicted_exactly_once(layout: str, tokens: int | None, sequences: int | None) -> None:
    batch = batches.ragged(101)
    num_tokens, shape = batch.tokens_T.numel(), Layout.of(parse_layout(layout), _replica(layout))
    starts = torch.zeros(num_tokens, dtype=torch.bool)
    starts[list(batch.offsets_S)] = True
    for pp in range(shape.pp):
        read_T, predicted_T = torch.zeros(2, num_tokens, dtype=torch.int64)
        routed_T = torch.zeros(num_tokens, dtype=torch.int64)
        for groups in ranks_of(layout):
            if groups.coords.pp != pp:
                continue
            for microbatch in cut(batch, groups, tokens, sequences):
                _check_rows(microbatch, batch, shape)
                sources_M = microbatch.sources_N[microbatch.router_rows_M]
                routed_T += _times_each(sources_M, num_tokens)
                if groups.coords.tp == 0:  # its tensor peers hold the same rows
                    read_T += _times_each(microbatch.sources_N, num_tokens)
                    predicted_T += _times_each(microbatch.targets_N, num_tokens)
        assert (read_T == 1).all() and (routed_T == 1).all()
        assert torch.equal(predicted_T, (~starts).long())
        assert (predicted_T[batch.mask_T] == 1).all()


def _replica(layout: str) -> int:
    parallel = parse_layout(layout)
    return parallel.tp * parallel.pp * parallel.cp


def _times_each(rows_N: torch.Tensor, num_tokens: int) -> torch.Tensor:
    return torch.bincount(rows_N[rows_N != NOWHERE], minlength=num_tokens)


def _check_rows(microbatch: Microbatch, batch: TrainBatch, shape: Layout) -> None:
    """A row reads its source, predicts the token after it, and stands at its position; padding has none of these."""
    sources_N, targets_N = microbatch.sources_N, microbatch.targets_N
    real_N, predicts_N = sources_N != NOWHERE, targets_N != NOWHERE
    assert torch.equal(targets_N[predicts_N], sources_N[predicts_N] + 1)
    assert torch.equal(microbatch.tokens.flatten()[real_N], batch.tokens_T[sources_N[real_N]])
    assert torch.equal(microbatch.labels_N[predicts_N], batch.tokens_T[targets_N[predicts_N]])
    assert not microbatch.tokens.flatten()[~real_N].any() and not microbatch.labels_N[~predicts_N].any()
    assert torch.equal(microbatch.sequence_N == NOWHERE, ~real_N)
    offsets_S = torch.tensor(batch.offsets_S)
    starts_N = offsets_S[torch.bucketize(sources_N[real_N], offsets_S, right=True) - 1]
    assert torch.equal(microbatch.position_ids.flatten()[real_N], sources_N[real_N] - starts_N)
    lengths_N = torch.tensor(microbatch.lengths or (0,))[microbatch.sequence_N[real_N]]
    assert torch.equal(lengths_N, torch.tensor(batch.lengths_S)[torch.bucketize(starts_N, offsets_S)])
    rows, width = microbatch.tokens.shape
    assert width * shape.cp == microbatch.width and width % shape.tp == 0
    assert microbatch.router_rows_M.numel() * shape.tp == rows * width


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", [32, 64])
def test_the_budget_is_kept_and_ranks_of_a_replica_agree(layout: str, tokens: int) -> None:
    plans = []
    for groups in ranks_of(layout):
        microbatches = cut(batches.ragged(101), groups, tokens, None)
        assert all(microbatch.width <= tokens for microbatch in microbatches)
        assert [microbatch.index for microbatch in microbatches] == list(range(len(microbatches)))
        plans.append([(microbatch.lengths, microbatch.width) for microbatch in microbatches])
    assert all(plan == plans[0] for plan in plans)


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if "pp" in layout])
@pytest.mark.parametrize(("tokens", "sequences"), SIZES)
def test_a_pipeline_gets_equal_shapes(layout: str, tokens: int | None, sequences: int | None) -> None:
    for groups in ranks_of(layout):
        microbatches = cut(batches.ragged(101), groups, tokens, sequences)
        assert len({(microbatch.tokens.shape, microbatch.width) for microbatch in microbatches}) == 1


@pytest.mark.parametrize(("layout", "multiple"), [("pp=2,vpp=2", 2), ("pp=3,vpp=2,tp=2", 3)])
@pytest.mark.parametrize(("tokens", "sequences"), SIZES)
def test_an_interleaved_pipeline_gets_a_multiple_of_its_stages(
    layout: str, multiple: int, tokens: int | None, sequences: int | None
) -> None:
    for groups in ranks_of(layout):
        assert len(cut(batches.ragged(101), groups, tokens, sequences)) % multiple == 0


@pytest.mark.parametrize("layout", ["pp=3,vpp=2", "pp=3,vpp=2,tp=2,cp=2"])
@pytest.mark.parametrize(("tokens", "sequences"), [(64, None), (None, 2)])
def test_an_empty_microbatch_is_padding_alone(layout: str, tokens: int | None, sequences: int | None) -> None:
    """One sequence for three microbatches."""
    for groups in ranks_of(layout):
        full, *empty = cut(batches.ragged(101, lengths=(13,)), groups, tokens, sequences)
        assert full.lengths == (13,) and len(empty) == 2
        for microbatch in empty:
            assert microbatch.lengths == ()
            for rows in (microbatch.sources_N, microbatch.targets_N, microbatch.sequence_N):
                assert (rows == NOWHERE).all()
            assert microbatch.tokens.shape[1] == full.tokens.shape[1]
            mask_N = microbatch.at_targets(torch.ones(13, dtype=torch.bool))
            assert mask_N is not None and not mask_N.any()


def test_sequences_of_one_token_predict_nothing() -> None:
    lone = TrainBatch(lengths_S=(1, 1), tokens_T=torch.tensor([3, 4]), mask_T=torch.zeros(2, dtype=torch.bool))
    for layout in ("", "cp=2", "tp=2"):
        for groups in ranks_of(layout):
            for sizes in ((8, None), (None, 1), (None, 2)):
                for microbatch in cut(lone, groups, *sizes):
                    assert (microbatch.targets_N == NOWHERE).all()


def test_a_pair_is_in_one_microbatch() -> None:
    """Sequences 0 and 4, 1 and 2, 3 and 6, and 5 by itself; without pairs they would be packed otherwise."""
    lengths, pairs_S = (9, 2, 3, 8, 1, 6, 2), (5, 6, 6, 7, 5, None, 7)
    plain = batches.ragged(101, lengths=lengths)
    for layout in ("", "cp=2"):
        for groups in ranks_of(layout):
            for sizes in ((16, None), (24, None), (None, 2), (None, 3)):
                microbatches = cut(replace(plain, pairs_S=pairs_S), groups, *sizes)
                together = [set(microbatch.lengths) for microbatch in microbatches]
                assert sum(len(microbatch.lengths) for microbatch in microbatches) == len(lengths)
                assert all({9, 1} <= each or not {9, 1} & each for each in together)
                assert all({3, 2} <= each or 3 not in each for each in together)
                assert all({8, 2} <= each or 8 not in each for each in together)
    (groups,) = ranks_of("")
    numbered = replace(plain, pairs_S=pairs_S, extra_S={"margin_S": torch.tensor(lengths) / 10})
    for microbatch in cut(numbered, groups, 16, None):  # the first of a pair in the batch is its first here
        assert torch.equal(
            microbatch.extra_of_sequences(numbered.extra_S)["margin_S"], torch.tensor(microbatch.lengths) / 10
        )
        pairs = microbatch.pairs(pairs_S)
        assert pairs is not None and pairs.dtype is torch.int64
        by_length = {tuple(microbatch.lengths[each] for each in pair) for pair in pairs.tolist()}
        assert by_length == {pair for pair in ((9, 1), (2, 3), (8, 2)) if max(pair) in microbatch.lengths}
    assert cut(plain, groups, 16, None)[0].pairs(None) is None
    assert not all(
        {9, 1} <= set(each.lengths) or not {9, 1} & set(each.lengths) for each in cut(plain, groups, 16, None)
    )


# ---- refusals ----


def test_pairs_that_do_not_fit_are_refused() -> None:
    (groups,) = ranks_of("")
    paired = replace(batches.ragged(101, lengths=(9, 12, 9, 1)), pairs_S=(1, 2, 1, 2))
    with pytest.raises(ConfigError, match=r"microbatch_tokens=17: 1 of 2 pairs do not fit; .* pair 0, takes 18 tokens"):
        cut(paired, groups, 17, None)
    assert len(cut(paired, groups, 18, None)) == 2
    with pytest.raises(ConfigError, match=r"microbatch_sequences=1: parts the two sequences of a pair. Write 2 or"):
        cut(paired, groups, None, 1)


def test_all_sequences_that_are_too_long_are_refused_at_once() -> None:
    (groups,) = ranks_of("")
    with pytest.raises(ConfigError) as refused:
        cut(batches.ragged(101), groups, 20, None)  # 13, 2, 29, 7, 1, 18, 23, 5, 11, 16
    message = str(refused.value)
    assert "microbatch_tokens=20" in message and "2 of 10 sequences" in message
    assert "sequence 2, takes 29 tokens" in message and "Write 29 or more" in message


@pytest.mark.parametrize("layout", ["", "cp=2", "tp=4", "tp=2,cp=2", "cp=4"])
def test_the_remedy_for_a_sequence_that_is_too_long_works(layout: str) -> None:
    """Also where the budget is cut down to what divides over the ranks: the message is about what the user wrote."""
    batch = batches.ragged(101, lengths=(29, 5))
    for groups in ranks_of(layout):
        with pytest.raises(ConfigError) as refused:
            cut(batch, groups, 27, None)
        (violation,) = refused.value.violations
        assert violation.value == 27
        enough = int(violation.remedy.removeprefix("Write ").removesuffix(" or more"))
        assert cut(batch, groups, enough, None)
        with pytest.raises(ConfigError):
            cut(batch, groups, enough - 1, None)


# ---- what two processes agree on ----


@dataclass
class Agreed:
    """(lengths, tokens.shape) of a rank's microbatches, by case."""

    unequal_data: list[tuple[tuple[int, ...], tuple[int, ...]]]
    equal_over_experts: list[tuple[tuple[int, ...], tuple[int, ...]]]
    scores: dict[str, TokenScores]


# Rank 0 has the most tokens, rank 1 the most microbatches of one sequence and the widest at the second place.
MINE = ((30, 20, 10), (9, 25, 3, 2, 1))
GATHERED = ("ep=2", "ep=2,etp=1", "etp=2", "tp=2,etp=1")


def _agree(rank: Rank) -> Agreed:
    def shapes(microbatches: list[Microbatch]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        return [(microbatch.lengths, tuple(microbatch.tokens.shape)) for microbatch in microbatches]

    batch = batches.ragged(101, lengths=MINE[rank.rank])
    with engines.world(rank):
        with engines.groups_of("ep=2") as groups:
            unequal = build_microbatches(batch, groups, tokens=None, sequences=1, equal_over_experts=False)
            equal = build_microbatches(batch, groups, tokens=None, sequences=1, equal_over_experts=True)
        scores = {}
        for layout in GATHERED:
            with engines.groups_of(layout) as groups:
                mine = engines.share_of(batches.ragged(101), groups)
                settings = engines.config(moe=MoeTrainConfig(dispatcher=Dispatcher.allgather))
                scores[layout] = engines.build(groups, models.moe(), settings, layout=layout).score(mine)
    return Agreed(shapes(unequal), shapes(equal), scores)


@pytest.fixture(scope="module")
def agreed(processes: None) -> list[Agreed]:
    return run_ranks(_agree, 2)


def test_data_parallel_ranks_run_equally_many_microbatches(agreed: list[Agreed]) -> None:
    first, second = (of_rank.unequal_data for of_rank in agreed)
    assert first == [((30,), (1, 30)), ((20,), (1, 20)), ((10,), (1, 10)), ((), (1, 1)), ((), (1, 1))]
    assert [lengths for lengths, _ in second] == [(9,), (25,), (3,), (2,), (1,)]


def test_experts_that_gather_get_equal_shapes(agreed: list[Agreed]) -> None:
    first, second = (of_rank.equal_over_experts for of_rank in agreed)
    assert [lengths for lengths, _ in first] == [(30,), (20,), (10,), (), ()]
    assert (
        [shape for _, shape in first] == [shape for _, shape in second] == [(1, 30), (1, 25), (1, 10), (1, 2), (1, 1)]
    )


@pytest.mark.parametrize("layout", GATHERED)
def test_the_gathering_dispatcher_takes_unequal_batches(layout: str, agreed: list[Agreed]) -> None:
    """Every rank's scores are there; that they are right is for the invariance gate."""
    for of_rank in agreed:
        logprobs_T = of_rank.scores[layout].logprobs_T
        assert logprobs_T is not None and logprobs_T.isfinite().all() and (logprobs_T < 0).any()


# ---- shared prompts ----


def prompted() -> TrainBatch:
    """Two samples of the prompt 1, 2, 3 with a sequence of another prompt between them."""
    mask_T = torch.tensor([0, 0, 0, 1, 1, 0, 1, 0, 0, 0, 1], dtype=torch.bool)
    return TrainBatch(lengths_S=(5, 2, 4), tokens_T=torch.tensor([1, 2, 3, 4, 5, 9, 8, 1, 2, 3, 6]), mask_T=mask_T)


def share(batch: TrainBatch, groups: ProcessGroups, tokens: int) -> list[Microbatch]:
    return build_microbatches(
        batch, groups, tokens=tokens, sequences=None, equal_over_experts=False, share_prompts=True
    )


def test_a_shared_prompt_by_hand() -> None:
    for groups in ranks_of("tp=2"):
        (microbatch,) = share(prompted(), groups, 16)
        assert microbatch.tokens.tolist() == [[1, 2, 3, 4, 5, 3, 6, 9, 8, 0]]
        assert microbatch.position_ids.tolist() == [[0, 1, 2, 3, 4, 2, 3, 0, 1, 2]]
        assert microbatch.labels_N.tolist() == [2, 3, 4, 5, 0, 6, 0, 8, 0, 0]
        assert microbatch.sources_N.tolist() == [0, 1, 2, 3, 4, 9, 10, 5, 6, NOWHERE]
        assert microbatch.targets_N.tolist() == [1, 2, 3, 4, NOWHERE, 10, NOWHERE, 6, NOWHERE, NOWHERE]
        assert microbatch.sequence_N.tolist() == [NOWHERE, NOWHERE, 0, 0, 0, 1, 1, 2, 2, NOWHERE]
        assert (microbatch.members, microbatch.lengths) == ((0, 2, 1), (5, 4, 2))
        packed, shared = microbatch.packed, microbatch.shared
        assert packed is not None and packed.trunks == (None, 0, 0, None) and packed.padded_lengths == (2, 3, 2, 3)
        assert shared is not None and shared.saved == 2
        assert shared.counts_N.tolist() == [2, 2, 1, 1, 1, 1, 1, 1, 1, 0]
        assert shared.run_N.tolist() == [0, 0, 1, 1, 1, 2, 2, 3, 3, NOWHERE]
        assert shared.parts_SR.tolist() == [[1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 1]]
        out_T = torch.full((12,), -1.0)
        microbatch.scatter_to_targets(torch.arange(10.0), out_T)
        assert out_T[:11].tolist() == [-1, 0, 1, 2, 3, -1, 7, -1, 0, 1, 5], "tokens 8 and 9 are those of the trunk"


def test_without_sharing_nothing_is_said_of_it() -> None:
    (groups,) = ranks_of("")
    (microbatch,) = cut(prompted(), groups, 16, None)
    assert microbatch.shared is None and microbatch.packed is not None and not microbatch.packed.trunks
    assert microbatch.members == (0, 1, 2)


@pytest.mark.parametrize("layout", ["", "tp=2", "pp=2,vpp=2", "pp=3,vpp=2,tp=2"])
@pytest.mark.parametrize("tokens", [36, 64, 4096])
def test_every_token_is_trained_once_and_computed_at_least_once(tokens: int, layout: str) -> None:
    batch = batches.prompted(101)
    num_tokens = batch.tokens_T.numel()
    for groups in ranks_of(layout):
        microbatches = share(batch, groups, tokens)
        targets = torch.cat([each.targets_N[each.targets_N != NOWHERE] for each in microbatches])
        trained = targets[batch.mask_T[targets]]
        assert sorted(trained.tolist()) == batch.mask_T.nonzero().flatten().tolist()
        own_T = torch.full((num_tokens + 1,), -1.0)
        for each in microbatches:
            assert each.width <= tokens
            for to, wanted in ((each.targets_N, each.labels_N), (each.sources_N, each.tokens.flatten())):
                assert torch.equal(batch.tokens_T[to[to != NOWHERE]], wanted[to != NOWHERE])
            each.scatter_to_targets(each.labels_N.float(), own_T)
        firsts = list(batch.offsets_S)
        said = torch.ones(num_tokens, dtype=torch.bool)
        said[firsts] = False
        assert torch.equal(own_T[:-1][said], batch.tokens_T[said].float()), "log-probs of prompts go to every sample"
        computed = sum(int((each.sources_N != NOWHERE).sum()) for each in microbatches)
        saved = sum(each.shared.saved for each in microbatches if each.shared is not None)
        assert computed + saved == num_tokens and saved > 0


def test_choices_of_experts_to_replay_part_a_trunk() -> None:
    (groups,) = ranks_of("")
    batch = prompted()
    routing_TLK = torch.zeros(11, 2, 2, dtype=torch.uint8)
    routing_TLK[8, 1] = 3
    (microbatch,) = share(replace(batch, routing_TLK=routing_TLK), groups, 16)
    assert microbatch.shared is not None and microbatch.shared.saved == 1
    assert microbatch.tokens.tolist() == [[1, 2, 3, 4, 5, 2, 3, 6, 9, 8]]
    free_T = torch.zeros(11, dtype=torch.bool)
    free_T[[1, 8]] = True
    (both,) = share(replace(batch, routing_TLK=routing_TLK, unrouted_T=free_T), groups, 16)
    assert both.shared is not None and both.shared.saved == 2, "nobody reads the choices of tokens that choose freely"
    free_T[1] = False
    (one,) = share(replace(batch, routing_TLK=routing_TLK, unrouted_T=free_T), groups, 16)
    assert one.shared is not None and one.shared.saved == 1
