"""Operations on sequences that are packed end to end: sums per sequence, values at tokens, discounted sums.

S sequences, T packed tokens, M of them trained.  No result of one sequence depends on another, so each rank computes
its own sequences, and no Python loop runs over tokens.  Statistics over all sequences are combined from those of each
(``Spreads``), in the order of the batch, so that they are the same bits whichever rank had a sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mcore_rl.ground.types import SentAsArrays

_SIDE_BY_SIDE = 1024  # sequences padded together; bounds the padding for one long response, fewer would be slower


def sequence_sums(x_T: Tensor, lengths: Sequence[int] | Tensor) -> Tensor:
    """The sum of the floating ``x_T`` over each sequence, [S]; 0 for a sequence of length 0."""
    lengths_S = torch.as_tensor(lengths, dtype=torch.int64)
    return torch.segment_reduce(x_T, "sum", lengths=lengths_S, unsafe=True)  # unsafe: lengths are not checked again


def sequence_counts(mask_T: Tensor, lengths_S: Sequence[int]) -> Tensor:
    """Trained tokens of each sequence, int64 [S]."""
    sequences = np.split(mask_T.numpy(), np.cumsum(lengths_S)[:-1])  # numpy counts bools 30 times as fast as torch
    return torch.tensor([np.count_nonzero(mask) for mask in sequences[: len(lengths_S)]], dtype=torch.int64)


def at_tokens(x_S: Tensor, lengths_S: Sequence[int]) -> Tensor:
    """``x_S`` at each token of its sequence, [T]."""
    return torch.from_numpy(np.repeat(x_S.numpy(), lengths_S))


def last_trained(mask_T: Tensor, lengths_S: Sequence[int]) -> Tensor:
    """The positions in T of the last trained token of each sequence that has one; int64, ascending."""
    places = []
    end = 0
    mask = mask_T.numpy()
    for length in lengths_S:
        backwards = mask[end : end + length][::-1]
        end += length
        place = int(backwards.argmax()) if length else 0
        if length and backwards[place]:
            places.append(end - 1 - place)
    return torch.tensor(places, dtype=torch.int64)


class Trained:
    """Gathers the trained tokens from [T] to [M] and scatters them back.  They form few runs, copied as slices.

    count: the number of trained tokens, M.
    """

    def __init__(self, mask_T: Tensor) -> None:
        mask = mask_T.numpy()
        changes = np.flatnonzero(mask[1:] ^ mask[:-1]) + 1
        self.mask_T = mask_T
        self.count = int(np.count_nonzero(mask))
        self._sizes: list[int] = np.diff(changes, prepend=0, append=len(mask)).tolist()
        self._first = 0 if len(mask) and mask[0] else 1  # runs are trained and untrained in turn

    def gather(self, x_T: Tensor) -> Tensor:
        """The values of the trained tokens, [M]."""
        return torch.cat([x_T[:0], *self._runs(x_T)])

    def scatter(self, x_M: Tensor) -> Tensor:
        """[T]: the values ``x_M`` at the trained tokens, 0 elsewhere."""
        trained = iter(torch.split(x_M, self._sizes[self._first :: 2]))
        zeros = x_M.new_zeros(max(self._sizes[1 - self._first :: 2], default=0))
        runs = [next(trained) if number % 2 == self._first else zeros[:size] for number, size in enumerate(self._sizes)]
        return torch.cat([x_M[:0], *runs])

    def _runs(self, x_T: Tensor) -> tuple[Tensor, ...]:
        return torch.split(x_T, self._sizes)[self._first :: 2]


@dataclass(frozen=True)
class Spread:
    """Statistics of ``count`` values.  variance: biased, divided by the count.  low, high: the extremes."""

    count: int
    mean: float
    variance: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Spreads(SentAsArrays):
    """Statistics of the values of each sequence, float64 [S]; all 0 for a sequence without values.

    squares_S: the sum of squared distances from the sequence's mean.  lows_S, highs_S: the extremes.
    """

    counts_S: Tensor
    means_S: Tensor
    squares_S: Tensor
    lows_S: Tensor
    highs_S: Tensor

    @classmethod
    def of(cls, x_M: Tensor, counts_S: Tensor) -> Spreads:
        """The statistics of ``x_M``: the values of all sequences one after another, ``counts_S`` of each.

        Sums are of differences from a sequence's first value, so that the variance of equal values is exactly 0.
        """
        present_S = counts_S > 0
        first_S = x_M.new_zeros(len(counts_S), dtype=torch.float64)
        first_S[present_S] = x_M[(counts_S.cumsum(0) - counts_S)[present_S]].double()
        from_first_M = x_M.double() - first_S.repeat_interleave(counts_S)
        from_first_S = sequence_sums(from_first_M, counts_S) / counts_S.clamp(min=1)
        squares_M = (from_first_M - from_first_S.repeat_interleave(counts_S)).square_()
        lows_S, highs_S = (
            torch.segment_reduce(x_M.double(), bound, lengths=counts_S, unsafe=True).where(present_S, 0)
            for bound in ("min", "max")
        )
        return cls(
            counts_S=counts_S.double(),
            means_S=first_S + from_first_S,
            squares_S=sequence_sums(squares_M, counts_S),
            lows_S=lows_S,
            highs_S=highs_S,
        )

    @classmethod
    def constant(cls, x_S: Tensor, counts_S: Tensor) -> Spreads:
        """The statistics of values that are equal within a sequence: ``counts_S`` times ``x_S``."""
        values_S = torch.where(counts_S > 0, x_S.double(), 0)
        return cls(
            counts_S=counts_S.double(),
            means_S=values_S,
            squares_S=torch.zeros_like(values_S),
            lows_S=values_S,
            highs_S=values_S,
        )

    def of_sequences(self, chosen_S: Tensor) -> Spreads:
        """Those of the sequences where ``chosen_S``, bool, is set."""
        return Spreads(**{each.name: getattr(self, each.name)[chosen_S] for each in fields(self)})

    def total(self) -> Spread | None:
        """The statistics of all sequences together; None if there is no value."""
        present_S = self.counts_S > 0
        if not bool(present_S.any()):
            return None
        counts = self.counts_S[present_S]
        means = self.means_S[present_S]
        count = float(counts.sum())
        from_first = means - means[0]
        mean = float((counts * from_first).sum() / count)
        squares = self.squares_S[present_S] + counts * (from_first - mean).square()
        return Spread(
            count=int(count),
            mean=float(means[0]) + mean,
            variance=float(squares.sum() / count),
            low=float(self.lows_S[present_S].min()),
            high=float(self.highs_S[present_S].max()),
        )


def discounted_sums(x_M: Tensor, counts_S: Tensor, factor: float) -> Tensor:
    """``y[t] = x[t] + factor * y[t + 1]`` within each sequence, [M].

    x_M: values of the trained tokens, sequence after sequence, ``counts_S`` of each.  ``_SIDE_BY_SIDE`` sequences at a
    time are padded to their longest and advance together.
    """
    summed = [x_M[:0]]
    for rows in _batches(torch.split(x_M, counts_S.tolist())):
        padded = pad_sequence(rows, batch_first=True).t().contiguous()  # row t: the values at t, contiguous
        for position in reversed(range(len(padded) - 1)):
            padded[position].add_(padded[position + 1], alpha=factor)
        again = padded.t().contiguous()
        summed += [row[: len(whole)] for row, whole in zip(again, rows, strict=True)]
    return torch.cat(summed)


def _batches(rows: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    for start in range(0, len(rows), _SIDE_BY_SIDE):
        yield list(rows[start : start + _SIDE_BY_SIDE])
