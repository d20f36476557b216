"""The boundaries of packed sequences, for all attention layers of a microbatch: computed once, lengths on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ParamSpec, TypeVar, cast

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from mcore_rl.parallel.context import concatenated_ranges, gather_indices, split_indices

P = ParamSpec("P")
T = TypeVar("T")
_FORGET: list[Callable[[], None]] = []


def cached_on_device(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function whose tensors depend on lengths and a device alone: the last 64 are kept."""
    cached = lru_cache(maxsize=64)(function)
    _FORGET.append(cached.cache_clear)
    return cast(Callable[P, T], cached)


def forget_cached() -> None:
    """Drop what is ``cached_on_device``: tensors of one pretended device are of no use on the next."""
    for forget in _FORGET:
        forget()


@dataclass(frozen=True)
class Segments:
    """The queries of one rank as runs of neighbours; each run attends to the start of its sequence.

    Run n holds ``query_lengths[n]`` queries of sequence ``sequences[n]``.  The last of them sees the first
    ``key_lengths[n]`` keys of that sequence, its trunk's before its own, the one before it one key less, and so on.
    """

    sequences: tuple[int, ...]
    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]

    @property
    def square(self) -> bool:
        """Whether every run is a whole sequence that attends to itself, which is so without context parallelism."""
        return self.query_lengths == self.key_lengths


@dataclass(frozen=True)
class Deepstack:
    """Features of pictures that are added behind the first layers.

    features: of each of these layers, leaves [features, H], in whose ``grad`` layers leave what comes back to them.
    index_M: the feature of each of the rows that this tensor rank's layers have.  has_M: whether there is one.
    """

    features: tuple[Tensor, ...]
    index_M: Tensor
    has_M: Tensor


@dataclass(kw_only=True)
class PackedSequences(PackedSeqParams):
    """Megatron's ``PackedSeqParams`` with the lengths kept as Python numbers, and what all layers derive from them.

    Reading ``cu_seqlens`` back would make the host wait for the device in every layer; everything here is derived at
    most once per microbatch.  Build it with ``of``.

    A sequence may continue another, its trunk: it then sees all of the trunk's tokens, and its positions go on where
    those end.  That is how the samples of a prompt share it (``data/shared_prompts.py``).

    lengths: tokens of each sequence.  padded_lengths: those plus the padding at its end, over all context-parallel
    ranks; the sum is T.  cp, cp_rank: this rank's place in the context-parallel group.  positions_3N: in time, height
    and width, of this rank's rows; None: each row's are its place in its sequence.  deepstack: what the first layers
    add to hidden states, of the forward pass that is on its way.  trunks: the number of each sequence's trunk, None
    where it has none; empty: no sequence has one.
    """

    lengths: tuple[int, ...]
    padded_lengths: tuple[int, ...]
    cp: int
    cp_rank: int
    device: torch.device
    positions_3N: Tensor | None = None
    deepstack: Deepstack | None = None
    trunks: tuple[int | None, ...] = ()

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        padded_lengths: Sequence[int],
        cp: int,
        cp_rank: int,
        device: torch.device,
        trunks: tuple[int | None, ...] = (),
    ) -> PackedSequences:
        """The record of rank ``cp_rank`` for sequences of ``lengths`` tokens that stand ``padded_lengths`` apart."""
        if trunks:
            assert cp == 1 and len(trunks) == len(lengths), "a trunk or None for each sequence, which is not cut"
            assert all(lengths[i] == padded_lengths[i] for i in trunks if i is not None), (
                "padding parts branch and trunk"
            )
        assert len(lengths) == len(padded_lengths), "one padded length per sequence"
        assert all(0 < real <= padded for real, padded in zip(lengths, padded_lengths, strict=True)), (
            f"lengths {tuple(lengths)} do not fit padded lengths {tuple(padded_lengths)}"
        )
        assert cp == 1 or all(padded % (2 * cp) == 0 for padded in padded_lengths), f"{padded_lengths} with cp={cp}"
        starts = boundaries(padded_lengths, device)
        longest = max(padded_lengths)
        return cls(
            qkv_format="thd",
            # Padding counts as the end of its sequence.  Attention is causal, so padding changes no real token, and
            # nothing trains on its output.  Transformer Engine is also fastest this way: it compares padded and real
            # boundaries (the host waits unless they are one tensor) and rules flash attention out where they differ.
            cu_seqlens_q=starts,
            cu_seqlens_kv=starts,
            cu_seqlens_q_padded=starts,
            cu_seqlens_kv_padded=starts,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            lengths=tuple(lengths),
            padded_lengths=tuple(padded_lengths),
            cp=cp,
            cp_rank=cp_rank,
            device=device,
            trunks=trunks,
        )

    @cached_property
    def first_positions(self) -> tuple[int, ...]:
        """The position of each sequence's first token; empty where all begin at 0."""
        return tuple(0 if trunk is None else self.padded_lengths[trunk] for trunk in self.trunks)

    @cached_property
    def segments(self) -> Segments:
        """This rank's runs: whole sequences without context parallelism, else an early and a late chunk of each."""
        if self.cp == 1:
            seen = self.padded_lengths
            if self.trunks:
                seen = tuple(own + before for own, before in zip(seen, self.first_positions, strict=True))
            return Segments(tuple(range(len(self.padded_lengths))), self.padded_lengths, seen)
        sequences = []
        queries = []
        keys = []
        for index, length in enumerate(self.padded_lengths):
            chunk = length // (2 * self.cp)
            for position in (self.cp_rank, 2 * self.cp - 1 - self.cp_rank):
                sequences.append(index)
                queries.append(chunk)
                keys.append(chunk * (position + 1))
        return Segments(tuple(sequences), tuple(queries), tuple(keys))

    @cached_property
    def gather_T(self) -> Tensor:
        """Indices that put the concatenation of all ranks' rows in sequence order; int64 [T] on the device."""
        return gather_indices(self.padded_lengths, self.cp).to(self.device)

    @cached_property
    def scatter_T(self) -> Tensor:
        """The inverse of ``gather_T``: indices of rank 0's rows, then rank 1's, and so on."""
        parts = [split_indices(self.padded_lengths, self.cp, rank) for rank in range(self.cp)]
        return torch.cat(parts).to(self.device)

    @cached_property
    def query_boundaries(self) -> Tensor:
        """Where each segment's queries start, and the end; int32 [segments + 1] on the device."""
        return boundaries(self.segments.query_lengths, self.device)

    @cached_property
    def key_boundaries(self) -> Tensor:
        """Where each segment's keys start in ``key_rows``, and the end; int32 [segments + 1] on the device."""
        return boundaries(self.segments.key_lengths, self.device)

    @cached_property
    def key_rows(self) -> Tensor:
        """Rows, in sequence order, of the keys that each segment sees, one segment after another; int64."""
        starts_S = boundaries(self.padded_lengths, torch.device("cpu")).long()
        starts = starts_S[torch.tensor(self.segments.sequences)]
        return concatenated_ranges(starts, torch.tensor(self.segments.key_lengths)).to(self.device)


def boundaries(lengths: Sequence[int], device: torch.device) -> Tensor:
    """``[0, lengths[0], lengths[0] + lengths[1], ...]``, int32: what flash kernels call cu_seqlens."""
    return F.pad(torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0)).to(device)


@cached_on_device
def row_positions(
    padded_lengths: tuple[int, ...], cp: int, cp_rank: int, device: torch.device, firsts: tuple[int, ...] = ()
) -> Tensor:
    """Position in its own sequence of each row that context rank ``cp_rank`` holds; float32 [T / cp].

    padded_lengths: tokens of each sequence over all ranks, laid end to end.  firsts: as ``first_positions``.
    The result is shared: read it only.
    """
    begins = firsts or (0,) * len(padded_lengths)
    positions_T = torch.cat(
        [
            torch.arange(first, first + length, dtype=torch.float32)
            for first, length in zip(begins, padded_lengths, strict=True)
        ]
    )
    return positions_T[split_indices(padded_lengths, cp, cp_rank)].to(device)
