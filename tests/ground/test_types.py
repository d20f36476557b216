"""The records by themselves: what a batch refuses, what ``select`` keeps, what the loss inputs sum."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from mcore_rl.algorithms.losses.token_losses import trained_rows
from mcore_rl.ground.types import LossInputs, Picture, TrainBatch
from mcore_rl.runtime.shard import Portion, shards_of
from tests.support import batches

LENGTHS = (3, 1, 4)


def batch(**changes: object) -> TrainBatch:
    settings = dict(
        lengths_S=LENGTHS,
        tokens_T=torch.arange(8),
        mask_T=torch.tensor([0, 1, 1, 0, 0, 1, 0, 1], dtype=torch.bool),
    )
    return TrainBatch(**(settings | changes))  # type: ignore[arg-type]


def test_offsets() -> None:
    assert batch().offsets_S == (0, 3, 4)


def test_token_fields_are_those_that_are_there() -> None:
    assert [name for name, _ in batch().token_fields()] == ["tokens_T", "mask_T"]
    names = [name for name, _ in batch(advantages_T=torch.zeros(8)).token_fields()]
    assert names == ["tokens_T", "mask_T", "advantages_T"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths_S": ()}, "at least one sequence"),
        ({"lengths_S": (3, 0, 5)}, "none is empty"),
        ({"tokens_T": torch.arange(7)}, "tokens_T has 7 rows for 8 tokens"),
        ({"advantages_T": torch.zeros(9)}, "advantages_T has 9 rows for 8 tokens"),
        ({"routing_TLK": torch.zeros(3, 8, 2)}, "routing_TLK has 3 rows for 8 tokens"),
        (
            {"teacher_hidden_MH": torch.zeros(3, 2), "teacher_scored_T": torch.arange(8) > 3},
            "a hidden state for each token that was scored",
        ),
        ({"teacher_hidden_MH": torch.zeros(3, 2)}, "no teacher scored"),
        ({"pairs_S": (1, 1)}, "pairs_S has a key a sequence"),
        ({"extra_S": {"margin_S": torch.zeros(2)}}, "a number a sequence"),
        ({"mask_T": torch.zeros(8)}, "masks are bool"),
        ({"mask_T": torch.tensor([0, 1, 1, 1, 0, 1, 0, 1], dtype=torch.bool)}, "first token of a sequence"),
    ],
)
def test_a_batch_refuses(changes: dict[str, object], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        batch(**changes)


def test_select_takes_whole_sequences_in_the_order_asked_for() -> None:
    routing_TLK = torch.arange(8 * 2 * 3).view(8, 2, 3).to(torch.int16)
    whole = batch(advantages_T=torch.arange(8) / 10, routing_TLK=routing_TLK)
    chosen = whole.select([2, 0])
    rows = torch.tensor([4, 5, 6, 7, 0, 1, 2])
    assert chosen.lengths_S == (4, 3)
    assert torch.equal(chosen.tokens_T, rows)
    assert chosen.mask_T.tolist() == [False, True, False, True, False, True, True]
    assert chosen.advantages_T is not None and torch.equal(chosen.advantages_T, rows / 10)
    assert chosen.routing_TLK is not None and torch.equal(chosen.routing_TLK, routing_TLK[rows])
    assert chosen.old_logprobs_T is None and chosen.pairs_S is None
    assert replace(whole, pairs_S=(7, None, 7)).select([2, 0]).pairs_S == (7, 7)
    numbered = replace(whole, extra_S={"margin_S": torch.tensor([0.5, 1.5, 2.5])})
    assert numbered.select([2, 0]).extra_S["margin_S"].tolist() == [2.5, 0.5] and not chosen.extra_S


def test_selecting_all_changes_nothing() -> None:
    whole = batches.ragged(101)
    again = whole.select(range(len(whole.lengths_S)))
    assert again.lengths_S == whole.lengths_S
    for (name, ours), (other, theirs) in zip(whole.token_fields(), again.token_fields(), strict=True):
        assert name == other and torch.equal(ours, theirs)


def test_to_a_device_takes_all_and_changes_nothing() -> None:
    whole = batches.ragged(101)
    assert batch(pairs_S=(7, None, 7)).to(torch.device("cpu")).pairs_S == (7, None, 7)
    moved = whole.to(torch.device("cpu"))
    assert moved.lengths_S == whole.lengths_S
    for (name, ours), (other, theirs) in zip(whole.token_fields(), moved.token_fields(), strict=True):
        assert name == other and torch.equal(ours, theirs)


def inputs(sum_over_context: object = lambda x: x, **changes: object) -> LossInputs:
    settings = dict(
        mask_N=torch.tensor([True, True, False, True, False]),
        sequence_N=torch.tensor([1, 0, -1, 1, -1]),
        num_sequences=2,
        sum_over_context=sum_over_context,
    )
    return LossInputs(**(settings | changes))  # type: ignore[arg-type]


def test_sequence_sums_leave_padding_out() -> None:
    x_N = torch.tensor([1.0, 2.0, 40.0, 8.0, 16.0], requires_grad=True)
    sums_S = inputs().sequence_sums(x_N)
    assert sums_S.tolist() == [2.0, 9.0]
    (sums_S * torch.tensor([3.0, 5.0])).sum().backward()
    assert x_N.grad is not None and x_N.grad.tolist() == [5.0, 3.0, 0.0, 5.0, 0.0]


def test_sequence_sums_go_through_the_context_ranks() -> None:
    """As if another rank held as much again."""
    assert inputs(lambda x: 2 * x).sequence_sums(torch.ones(5)).tolist() == [2.0, 4.0]


def test_a_microbatch_of_padding_alone_still_sums() -> None:
    empty = inputs(mask_N=torch.zeros(3, dtype=torch.bool), sequence_N=torch.full((3,), -1), num_sequences=0)
    x_N = torch.ones(3, requires_grad=True)
    sums_S = empty.sequence_sums(x_N)
    assert sums_S.tolist() == [0.0]
    assert empty.expand(sums_S).tolist() == [0.0, 0.0, 0.0]
    sums_S.sum().backward()
    assert x_N.grad is not None and not x_N.grad.any()


def test_shares_of_a_sequence_add_up_to_one_over_the_context_ranks() -> None:
    """This rank has two rows of sequence 1 and one of sequence 0; others have two of each."""
    others = torch.tensor([2.0, 2.0], dtype=torch.float64)
    mine_S = inputs(lambda x_S: x_S + others).own_shares(torch.float64)
    assert mine_S.tolist() == [1 / 3, 2 / 4] and mine_S.dtype is torch.float64
    none = inputs(lambda x_S: x_S + others, sequence_N=torch.full((5,), -1)).own_shares(torch.float64)
    assert none.tolist() == [0, 0]


def test_expand_is_the_value_of_a_rows_sequence() -> None:
    values_N = inputs().expand(torch.tensor([10.0, 20.0]))
    assert values_N[[0, 1, 3]].tolist() == [20.0, 10.0, 20.0]


def test_fields_of_rows_travel_with_the_batch() -> None:
    """``extra_T``: through selection, a shard, and to the rows of a loss, which are zero where they are not trained."""
    whole = TrainBatch(
        lengths_S=(2, 3),
        tokens_T=torch.arange(5),
        mask_T=torch.tensor([False, True, False, True, False]),
        extra_T={"own_T": torch.arange(5.0) + 1},
    )
    assert [name for name, _ in whole.token_fields()] == ["tokens_T", "mask_T", "own_T"]
    assert whole.select([1]).extra_T["own_T"].tolist() == [3, 4, 5]
    fields = (("tokens_T", 0), ("mask_T", 0), ("own_T", 0))
    (joined,) = Portion(fields, ((((0, 1), (0, 0)),),), None).join(shards_of(whole, [[0, 1]]))
    assert joined.extra_T["own_T"].tolist() == [3, 4, 5, 1, 2] and joined.tokens_T.tolist() == [2, 3, 4, 0, 1]
    mask_N = torch.tensor([True, False])
    inputs = LossInputs(
        mask_N=mask_N, sequence_N=torch.zeros(2), num_sequences=1, sum_over_context=lambda x: x,
        extra_N={"own_N": torch.tensor([2.0, float("nan")])},
    )  # fmt: skip
    assert trained_rows(inputs).extra_N["own_N"].tolist() == [2.0, 0.0]
    with pytest.raises(AssertionError, match="own_T has 4 rows for 5 tokens"):
        replace(whole, extra_T={"own_T": torch.zeros(4)})


def test_features_and_patches_are_those_of_the_pictures() -> None:
    image = Picture("a", 2, 4, 2)
    whole = TrainBatch(
        lengths_S=(3, 2),
        tokens_T=torch.arange(5),
        mask_T=torch.tensor([False, False, True, False, True]),
        feature_T=torch.tensor([0, 1, -1, -1, -1], dtype=torch.int32),
        images_S=((image,), ()),
        patches={"a": np.zeros((8, 6), dtype=np.uint8)},
    )
    for feature_T in ([0, 1, 2, -1, -1], [0, -1, -1, -1, -1], [1, 0, -1, -1, -1], [0, 1, -1, 0, -1]):
        with pytest.raises(AssertionError, match="each feature"):
            replace(whole, feature_T=torch.tensor(feature_T, dtype=torch.int32))
    with pytest.raises(AssertionError, match="picture a has 0 patches"):
        replace(whole, patches={}).demand_patches()
    with pytest.raises(AssertionError, match="picture a has 7 patches"):
        replace(whole, patches={"a": np.zeros((7, 6), dtype=np.uint8)}).demand_patches()
    whole.demand_patches()
    assert whole.patches_S == [8, 0]
