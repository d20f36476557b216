"""What a rank makes of the shards that it is handed is what it would have selected."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from mcore_rl.ground.types import Picture, SequenceScores, TrainBatch
from mcore_rl.runtime.shard import Portion, Shard, shards_of
from mcore_rl.runtime.shared_batch import SharedBatch


def whole() -> TrainBatch:
    return TrainBatch(
        lengths_S=(2, 3, 1, 2),
        tokens_T=torch.arange(8, dtype=torch.int32),
        mask_T=torch.tensor([False, True, False, True, True, False, False, True]),
        advantages_T=torch.arange(8.0) / 3,
        routing_TLK=torch.arange(8 * 6, dtype=torch.int16).view(8, 3, 2),
    )


def test_a_batch_is_its_sequences_in_order_wherever_they_lie() -> None:
    batch = whole()
    names = [name for name, _ in batch.token_fields()]
    shards = [pickle.loads(pickle.dumps(shard, protocol=5)) for shard in shards_of(batch, [[3, 0], [1], [2]])]
    shared = SharedBatch(batch.lengths_S, [[3, 0], [1], [2]])
    shared.add(shared.assignment, shards, names)
    (refs,) = shared.shard_refs([[[0, 2], [1, 3, 0]]], names, ["payload"])
    portion: Portion[str] = pickle.loads(refs.portion)
    assert portion.payload == "payload" and len(refs.shards) == 3
    for indices, joined in zip([[0, 2], [1, 3, 0]], portion.join(refs.shards), strict=True):
        expected = batch.select(indices)
        assert joined.lengths_S == expected.lengths_S and joined.tokens_T.dtype == torch.int64
        for (name, ours), (_, theirs) in zip(joined.token_fields(), expected.token_fields(), strict=True):
            assert torch.equal(ours, theirs.long() if name == "tokens_T" else theirs), name


def test_fields_that_were_added_take_the_place_of_what_was_there() -> None:
    batch = whole()
    names = [name for name, _ in batch.token_fields()]
    shared = SharedBatch(batch.lengths_S, [[0, 1, 2, 3]])
    shared.add(shared.assignment, shards_of(batch, shared.assignment), names)
    masks = {index: torch.zeros(batch.lengths_S[index], dtype=torch.bool) for index in range(4)}
    masks[1][2] = True
    later = [Shard.of([1, 3], mask_T=torch.cat([masks[2], masks[1]])), Shard.of([2, 2], mask_T=torch.zeros(4).bool())]
    shared.add([[2, 1], [0, 3]], later, ["mask_T"])
    (refs,) = shared.shard_refs([[[1, 3]]], [*names, "weights_T"], [None])
    (joined,) = pickle.loads(refs.portion).join(refs.shards)
    assert joined.mask_T.tolist() == [False, False, True, False, False]
    assert joined.tokens_T.tolist() == [2, 3, 4, 6, 7] and joined.weights_T is None
    assert len(refs.shards) == 3, "the tokens' shard, and both of the masks'"


def test_a_shard_is_cut_without_copies_and_joined_into_memory_of_its_own() -> None:
    batch = whole()
    (shard,) = shards_of(batch, [[1]])
    assert batch.advantages_T is not None
    batch.advantages_T[2] = 9
    assert shard.fields["advantages_T"][0][0] == 9
    fields = (("tokens_T", 0), ("mask_T", 0), ("advantages_T", 0))
    (joined,) = Portion(fields, (((((0, 0),),)),), None).join([shard])
    assert joined.advantages_T is not None
    joined.advantages_T.zero_()
    assert batch.advantages_T[2] == 9


def test_what_is_made_behind_other_prompts_is_moved_to_the_same_responses() -> None:
    shard = Shard.of([4, 2, 3], told_logprobs_T=torch.arange(1.0, 10.0))
    moved = shard.behind([3, 4, 3]).fields["told_logprobs_T"]
    assert [part.tolist() for part in moved] == [[2, 3, 4], [0, 0, 5, 6], [7, 8, 9]]


def test_shards_travel_out_of_band() -> None:
    shard, buffers = Shard.of([3, 1], old_logprobs_T=torch.arange(4.0), weights_T=None), list[pickle.PickleBuffer]()
    sent = pickle.dumps(shard, protocol=5, buffer_callback=buffers.append)
    assert sum(buffer.raw().nbytes for buffer in buffers) == 16
    received = pickle.loads(sent, buffers=[bytes(buffer.raw()) for buffer in buffers])
    assert list(received.fields) == ["old_logprobs_T"]
    assert [part.tolist() for part in received.fields["old_logprobs_T"]] == [[0, 1, 2], [3]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_hidden_states_travel_with_the_tokens_that_they_are_of(dtype: torch.dtype) -> None:
    """In their dtype, also where a shard has none; and of what is trained later, some are not read."""
    batch = whole()
    hidden_MH = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).to(dtype)  # of sequences 0, 1, 1 and 3
    taught = replace(batch, teacher_hidden_MH=hidden_MH, teacher_scored_T=batch.mask_T)
    shared = SharedBatch(batch.lengths_S, [[0, 1, 2, 3]])
    names = [name for name, _ in batch.token_fields()]
    shared.add(shared.assignment, shards_of(batch, shared.assignment), names)
    ranks = [[3, 1], [2], [0]]
    parts = [taught.select(members) for members in ranks]
    assert parts[1].teacher_hidden_MH is not None and len(parts[1].teacher_hidden_MH) == 0
    sent = [pickle.dumps(Shard.of_hidden(each, each.teacher_hidden_MH), protocol=5) for each in parts]  # type: ignore[arg-type]
    made = ("teacher_hidden_MH", "teacher_scored_T")
    shared.add(ranks, [pickle.loads(each) for each in sent], made)
    (refs,) = shared.shard_refs([[[0, 1, 2], [2, 3]]], [*names, *made], [None])
    for indices, joined in zip([[0, 1, 2], [2, 3]], pickle.loads(refs.portion).join(refs.shards), strict=True):
        expected = taught.select(indices)
        assert joined.teacher_hidden_MH is not None and expected.teacher_hidden_MH is not None
        assert joined.teacher_hidden_MH.dtype == dtype
        assert torch.equal(joined.teacher_hidden_MH, expected.teacher_hidden_MH)
        assert joined.teacher_scored_T is not None and torch.equal(
            joined.teacher_scored_T, batch.select(indices).mask_T
        )


def test_records_of_each_rank_become_one_in_the_order_of_the_batch() -> None:
    shared = SharedBatch((1, 1, 1), [[2], [1, 0]])
    parts = [
        SequenceScores(sums_S=torch.tensor([2.0]), entropy_S=None),
        SequenceScores(sums_S=torch.tensor([1.0, 0.0]), entropy_S=None),
    ]
    parts = [pickle.loads(pickle.dumps(part)) for part in parts]
    joined = shared.in_order(shared.assignment, parts)
    assert joined.sums_S.tolist() == [0.0, 1.0, 2.0] and joined.entropy_S is None
    assert isinstance(joined.sums_S.numpy(), np.ndarray) and joined.sums_S.add_(1).tolist() == [1.0, 2.0, 3.0]


def test_pictures_go_to_who_reads_features_and_patches_to_who_has_a_tower() -> None:
    """A picture of two sequences is handed once; other pipeline stages get none of the patches."""
    one, two = Picture("one", 2, 2, 1), Picture("two", 2, 4, 2)
    batch = replace(
        whole(),
        feature_T=torch.tensor([0, -1, 0, 1, 2, -1, -1, 0], dtype=torch.int32),
        positions_T3=torch.arange(24, dtype=torch.int32).view(8, 3),
        images_S=((one,), (one, two), (), (one,)),
    )
    patches = {"one": np.zeros((4, 6), np.uint8), "two": np.ones((8, 6), np.uint8)}
    names = [name for name, _ in batch.token_fields()]
    shared = SharedBatch(batch.lengths_S, [[0, 1, 2, 3]], images_S=batch.images_S, patches=patches)  # type: ignore[arg-type]
    shared.add(shared.assignment, shards_of(batch, shared.assignment), names)
    (refs,) = shared.shard_refs([[[3, 1], [2]]], names, [None])
    assert [len(each) for each in refs.patches] == [4, 8]
    portion = pickle.loads(refs.portion)
    for given in ([*refs.shards, *refs.patches], refs.shards):
        for indices, joined in zip([[3, 1], [2]], portion.join(given), strict=True):
            expected = batch.select(indices)
            assert joined.images_S == expected.images_S
            assert joined.feature_T is not None and expected.feature_T is not None
            assert torch.equal(joined.feature_T, expected.feature_T)
            assert joined.positions_T3 is not None and expected.positions_T3 is not None
            assert torch.equal(joined.positions_T3, expected.positions_T3)
            assert joined.patches.keys() == (patches.keys() if given is not refs.shards else set())
    (refs,) = shared.shard_refs([[[0, 1]]], ["tokens_T", "mask_T"], [None])
    (joined,) = pickle.loads(refs.portion).join(refs.shards)
    assert refs.patches == [] and joined.images_S is None and joined.feature_T is None
