"""The zig-zag split: an exact permutation, balanced, and in the order that Megatron's rotary embedding assumes."""

from __future__ import annotations

import pytest
import torch

from mcore_rl.parallel.context import concatenated_ranges, gather_indices, merge, padded_lengths, split, split_indices

LENGTHS = (1, 7, 8, 16, 3, 25)


def test_each_sequence_is_padded_to_two_chunks_per_rank() -> None:
    assert padded_lengths((1, 7, 8, 9), 1) == (1, 7, 8, 9)
    assert padded_lengths((1, 7, 8, 9), 2) == (4, 8, 8, 12)
    assert padded_lengths((1, 7, 8, 9), 4) == (8, 8, 8, 16)


def test_ranges_are_concatenated_and_may_be_empty() -> None:
    rows = concatenated_ranges(torch.tensor([5, 0, 9]), torch.tensor([2, 0, 3]))
    assert rows.tolist() == [5, 6, 9, 10, 11]


def test_a_rank_holds_an_early_and_a_late_chunk_of_every_sequence() -> None:
    # cp=2, two sequences: chunks of 1 (rows 0..3) and of 2 (rows 4..11).
    assert split_indices((4, 8), 2, 0).tolist() == [0, 3, 4, 5, 10, 11]
    assert split_indices((4, 8), 2, 1).tolist() == [1, 2, 6, 7, 8, 9]


@pytest.mark.parametrize("cp", [1, 2, 3, 4])
def test_merge_undoes_split(cp: int) -> None:
    lengths = padded_lengths(LENGTHS, cp)
    x_T = torch.randn(sum(lengths), 3)
    parts = [split(x_T, lengths, cp, rank) for rank in range(cp)]
    assert {part.shape[0] for part in parts} == {sum(lengths) // cp}, "every rank holds the same number of rows"
    assert torch.equal(merge(parts, lengths), x_T)
    assert torch.equal(torch.cat(parts)[gather_indices(lengths, cp)], x_T)


@pytest.mark.parametrize("cp", [2, 4])
def test_causal_work_is_balanced(cp: int) -> None:
    lengths = padded_lengths(LENGTHS, cp)
    keys_seen_T = torch.cat([torch.arange(1, length + 1) for length in lengths])
    work = {int(keys_seen_T[split_indices(lengths, cp, rank)].sum()) for rank in range(cp)}
    assert len(work) == 1


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_order_is_that_of_megatrons_rotary_embedding(cp: int) -> None:
    from megatron.core.models.common.embeddings.rope_utils import _get_thd_freqs_on_this_cp_rank

    lengths = padded_lengths(LENGTHS, cp)
    freqs = torch.arange(max(lengths))  # stands for the angles: entry i belongs to position i of a sequence
    positions_T = torch.cat([torch.arange(length) for length in lengths])
    for rank in range(cp):
        local = [torch.empty(length // cp) for length in lengths]
        assumed = torch.cat([_get_thd_freqs_on_this_cp_rank(rank, cp, x, freqs) for x in local])
        assert torch.equal(split(positions_T, lengths, cp, rank), assumed)


def test_gradients_flow_back_to_the_rows_they_came_from() -> None:
    lengths = padded_lengths(LENGTHS, 2)
    x_T = torch.randn(sum(lengths), requires_grad=True)
    weight_T = torch.randn(sum(lengths))
    parts = [split(x_T, lengths, 2, rank) for rank in range(2)]
    (merge(parts, lengths) * weight_T).sum().backward()
    assert torch.equal(x_T.grad, weight_T)


def test_lengths_that_do_not_divide_are_refused() -> None:
    with pytest.raises(AssertionError, match="2 \\* 2 chunks"):
        split_indices((4, 6), 2, 0)
    with pytest.raises(AssertionError, match="3 rows"):
        split(torch.zeros(3), (4,), 2, 0)
