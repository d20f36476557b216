"""The context-parallel split of packed sequences: zig-zag, so that causal attention costs every rank the same.

Each sequence is padded to a multiple of ``2 * cp`` and cut into ``2 * cp`` equal chunks; rank r holds chunks r and
``2 * cp - 1 - r`` of every sequence, in that order, sequence after sequence (arXiv:2407.21783, section 3.3.2).
Megatron's rotary embedding assumes this order (``_get_thd_freqs_on_this_cp_rank`` in megatron-core 0.16.1,
models/common/embeddings/rope_utils.py), and so does Transformer Engine's context-parallel attention.

Nothing here communicates or knows process groups.  Invariant: ``merge`` undoes ``split`` exactly, for any lengths.
With ``cp=1`` nothing is padded and nothing moves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

# Index tensors to cache: log-probs, forward and recompute of a step share them; a larger cache only holds memory.
_CACHED_PLANS = 256


def rows_multiple(cp: int, tp: int) -> int:
    """The divisor of a microbatch's rows that context (zig-zag) and sequence parallelism need to split it."""
    return math.lcm(2 * cp if cp > 1 else 1, cp * tp)


def padded_rows(lengths: Sequence[int], cp: int, tp: int) -> int:
    """The rows of a microbatch of sequences of ``lengths`` tokens, over all context ranks, with their padding."""
    multiple = rows_multiple(cp, tp)
    return -(-sum(padded_lengths(lengths, cp)) // multiple) * multiple


def padded_lengths(lengths: Sequence[int], cp: int) -> tuple[int, ...]:
    """``lengths`` in tokens, each rounded up to a multiple of ``2 * cp``; unchanged if ``cp`` is 1."""
    multiple = 2 * cp if cp > 1 else 1
    return tuple(-(-length // multiple) * multiple for length in lengths)


def concatenated_ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """``starts[i], starts[i] + 1, ..., starts[i] + lengths[i] - 1`` for each i, one after another; int64."""
    before = lengths.cumsum(0) - lengths
    return torch.repeat_interleave(starts - before, lengths) + torch.arange(int(lengths.sum()))


@lru_cache(maxsize=_CACHED_PLANS)
def split_indices(padded_lengths: tuple[int, ...], cp: int, rank: int) -> Tensor:
    """Rows of the padded packed tensor that ``rank`` holds, in its order; int64 [T / cp] on the CPU.

    padded_lengths: tokens of each sequence, multiples of ``2 * cp`` (of 1 if ``cp`` is 1).  The result is shared:
    do not write to it.
    """
    assert 0 <= rank < cp, f"no rank {rank} in a context-parallel group of {cp}"
    lengths_S = torch.tensor(padded_lengths, dtype=torch.int64)
    if cp == 1:
        return torch.arange(int(lengths_S.sum()))
    assert not (lengths_S % (2 * cp)).any(), f"{padded_lengths} do not all divide into 2 * {cp} chunks"
    chunks_S = lengths_S // (2 * cp)
    held = torch.tensor([rank, 2 * cp - 1 - rank])
    starts_S2 = (lengths_S.cumsum(0) - lengths_S)[:, None] + chunks_S[:, None] * held
    return concatenated_ranges(starts_S2.flatten(), chunks_S.repeat_interleave(2))


@lru_cache(maxsize=_CACHED_PLANS)
def gather_indices(padded_lengths: tuple[int, ...], cp: int) -> Tensor:
    """The permutation that puts all ranks' parts, concatenated in rank order, in sequence order; int64 [T] on the CPU.

    ``torch.cat(parts)[gather_indices(...)]`` is the packed tensor.  The result is shared: do not write to it.
    """
    rows_T = torch.cat([split_indices(padded_lengths, cp, rank) for rank in range(cp)])
    return torch.empty_like(rows_T).index_copy_(0, rows_T, torch.arange(rows_T.numel()))


def split(x_T: Tensor, padded_lengths: tuple[int, ...], cp: int, rank: int) -> Tensor:
    """The rows of the padded packed ``x_T`` [T, ...] that ``rank`` holds, [T / cp, ...]; differentiable."""
    assert x_T.shape[0] == sum(padded_lengths), f"{x_T.shape[0]} rows for sequences of {sum(padded_lengths)} tokens"
    return x_T.index_select(0, split_indices(padded_lengths, cp, rank).to(x_T.device))


def merge(parts: Sequence[Tensor], padded_lengths: tuple[int, ...]) -> Tensor:
    """All ranks' parts, in rank order, back to the padded packed tensor [T, ...]; the inverse of ``split``."""
    joined_T = torch.cat(list(parts))
    assert joined_T.shape[0] == sum(padded_lengths), f"{joined_T.shape[0]} rows for {sum(padded_lengths)} tokens"
    return joined_T.index_select(0, gather_indices(padded_lengths, len(parts)).to(joined_T.device))
