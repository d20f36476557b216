"""What a rank is sent of a batch is what it would have selected."""

from __future__ import annotations

import pickle

import torch

from mcore_rl.runtime.shard import shards_of
from mcore_rl.types import TokenScores, TrainBatch


def whole() -> TrainBatch:
    return TrainBatch(
        lengths_S=(2, 3, 1, 2),
        tokens_T=torch.arange(8, dtype=torch.int32),
        mask_T=torch.tensor([False, True, False, True, True, False, False, True]),
        advantages_T=torch.arange(8.0) / 3,
        routing_TLK=torch.arange(8 * 6, dtype=torch.int16).view(8, 3, 2),
    )


def test_a_shard_is_its_sequences_in_order() -> None:
    batch, members = whole(), [[3, 0], [1], [2, 1, 0]]
    for indices, shard in zip(members, shards_of(batch, members), strict=True):
        found, expected = pickle.loads(pickle.dumps(shard, protocol=5)).batch(), batch.select(indices)
        assert found.lengths_S == expected.lengths_S
        assert found.tokens_T.dtype == torch.int64
        assert [name for name, _ in found.token_fields()] == [name for name, _ in expected.token_fields()]
        for (name, ours), (_, theirs) in zip(found.token_fields(), expected.token_fields(), strict=True):
            assert torch.equal(ours, theirs.long() if name == "tokens_T" else theirs), name


def test_a_shard_is_cut_without_copies_and_joined_into_memory_of_its_own() -> None:
    batch = whole()
    shard = shards_of(batch, [[1]])[0]
    assert batch.advantages_T is not None
    batch.advantages_T[2] = 9
    assert shard.fields["advantages_T"][0][0] == 9
    joined = shard.batch()
    assert joined.advantages_T is not None
    joined.advantages_T.zero_()
    assert batch.advantages_T[2] == 9


def test_scores_travel_out_of_band() -> None:
    scores, buffers = TokenScores(logprobs_T=torch.arange(4.0)), list[pickle.PickleBuffer]()
    sent = pickle.dumps(scores, protocol=5, buffer_callback=buffers.append)
    assert sum(buffer.raw().nbytes for buffer in buffers) == 16
    found = pickle.loads(sent, buffers=[bytes(buffer.raw()) for buffer in buffers])
    assert found.logprobs_T.tolist() == [0, 1, 2, 3]
    assert found.values_T is None
