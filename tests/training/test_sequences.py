"""The record of packed sequences: what other readers of it expect, and the segments of each context-parallel rank."""

from __future__ import annotations

import pytest
import torch

from mcore_rl.training.sequences import PackedSequences, boundaries, row_positions

CPU = torch.device("cpu")


def test_record_is_what_transformer_engine_and_the_rotary_embedding_read() -> None:
    packed = PackedSequences.of((3, 5), (4, 8), 2, 1, CPU)
    assert packed.qkv_format == "thd"
    assert packed.cu_seqlens_q.tolist() == [0, 4, 12]
    assert packed.cu_seqlens_q.dtype == torch.int32
    assert packed.cu_seqlens_q is packed.cu_seqlens_kv
    assert packed.cu_seqlens_q is packed.cu_seqlens_q_padded
    assert packed.cu_seqlens_q is packed.cu_seqlens_kv_padded
    assert (packed.max_seqlen_q, packed.max_seqlen_kv) == (8, 8)


def test_segments_of_a_context_rank_are_its_early_and_its_late_chunk() -> None:
    whole = PackedSequences.of((3, 5), (4, 8), 1, 0, CPU).segments
    assert whole.square
    assert (whole.sequences, whole.query_lengths, whole.key_lengths) == ((0, 1), (4, 8), (4, 8))
    second = PackedSequences.of((3, 5), (4, 8), 2, 1, CPU)
    parts = second.segments
    assert not parts.square
    # chunks 1 and 2 of four: of one token each, then of two
    assert (parts.sequences, parts.query_lengths, parts.key_lengths) == ((0, 0, 1, 1), (1, 1, 2, 2), (2, 3, 4, 6))
    assert second.query_boundaries.tolist() == [0, 1, 2, 4, 6]
    assert second.key_boundaries.tolist() == [0, 2, 5, 9, 15]
    assert second.key_rows.tolist() == [0, 1, 0, 1, 2, 4, 5, 6, 7, 4, 5, 6, 7, 8, 9]


def test_gather_and_scatter_undo_each_other() -> None:
    packed = PackedSequences.of((3, 5, 16), (4, 8, 16), 2, 0, CPU)
    rows_T = torch.arange(28)
    assert torch.equal(rows_T[packed.scatter_T][packed.gather_T], rows_T)
    assert boundaries((2, 5), CPU).tolist() == [0, 2, 7]


@pytest.mark.parametrize(
    ("lengths", "padded", "cp"), [((3,), (2,), 1), ((0,), (2,), 1), ((3, 5), (4,), 1), ((3,), (6,), 2)]
)
def test_lengths_that_do_not_fit_are_refused(lengths: tuple[int, ...], padded: tuple[int, ...], cp: int) -> None:
    with pytest.raises(AssertionError):
        PackedSequences.of(lengths, padded, cp, 0, CPU)


def test_positions_start_again_with_each_sequence() -> None:
    assert row_positions((3, 1, 2), 1, 0, CPU).tolist() == [0, 1, 2, 0, 0, 1]


def test_positions_follow_the_zig_zag_of_context_ranks() -> None:
    assert row_positions((8, 4), 2, 0, CPU).tolist() == [0, 1, 6, 7, 0, 3]
    assert row_positions((8, 4), 2, 1, CPU).tolist() == [2, 3, 4, 5, 1, 2]


def test_branches_see_their_trunk_and_go_on_where_it_ends() -> None:
    """A trunk of 3 with branches of 2 and 1, and a sequence by itself, which takes the padding."""
    packed = PackedSequences.of((3, 2, 1, 2), (3, 2, 1, 4), 1, 0, CPU, trunks=(None, 0, 0, None))
    parts = packed.segments
    assert not parts.square
    assert (parts.query_lengths, parts.key_lengths) == ((3, 2, 1, 4), (3, 5, 4, 4))
    assert packed.first_positions == (0, 3, 3, 0)
    positions = row_positions(packed.padded_lengths, 1, 0, CPU, packed.first_positions)
    assert positions.tolist() == [0, 1, 2, 3, 4, 3, 0, 1, 2, 3]
    assert PackedSequences.of((3, 2), (3, 2), 1, 0, CPU).first_positions == ()


def test_neither_padding_nor_a_context_rank_parts_a_trunk_from_its_branches() -> None:
    with pytest.raises(AssertionError, match="padding"):
        PackedSequences.of((3, 2), (4, 2), 1, 0, CPU, trunks=(None, 0))
    with pytest.raises(AssertionError, match="not cut"):
        PackedSequences.of((4, 4), (4, 4), 2, 0, CPU, trunks=(None, 0))
