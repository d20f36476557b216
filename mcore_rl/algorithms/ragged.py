"""Sequences laid end to end: sums over each, values at each of its tokens, discounted sums from each token on.

S sequences, T packed tokens, M of them trained.  No result of one sequence depends on another, and no Python loop runs
over tokens: the controller does this for a whole step at once, on the CPU.  A step may have 10^8 tokens, where what
costs is the memory that is written for the first time: intermediate results are made ``CHUNK`` tokens at a time, and
whole sequences are copied as slices instead of being gathered by index.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

CHUNK = 1 << 14  # tokens whose intermediate results stay in the cache, and with one thread: no team is woken for so few
_SIDE_BY_SIDE = 1024  # bounds the padding that one long response costs; fewer would only mean more steps


def sequence_sums(x_T: Tensor, lengths: Sequence[int] | Tensor) -> Tensor:
    """Sum of the floating ``x_T`` over each sequence, [S]; 0 for a length of 0."""
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
    """Where in T the last trained token of each sequence that has one stands; int64, ascending."""
    found, end = [], 0
    mask = mask_T.numpy()
    for length in lengths_S:
        backwards = mask[end : end + length][::-1]
        end += length
        place = int(backwards.argmax()) if length else 0
        if length and backwards[place]:
            found.append(end - 1 - place)
    return torch.tensor(found, dtype=torch.int64)


class Trained:
    """Takes the trained tokens out of [T] and puts them back.  They stand in few runs, which are copied as slices.

    count: M.
    """

    def __init__(self, mask_T: Tensor) -> None:
        mask = mask_T.numpy()
        changes = np.flatnonzero(mask[1:] ^ mask[:-1]) + 1
        self.mask_T, self.count = mask_T, int(np.count_nonzero(mask))
        self._sizes: list[int] = np.diff(changes, prepend=0, append=len(mask)).tolist()
        self._first = 0 if len(mask) and mask[0] else 1  # runs are trained and untrained in turn

    def gather(self, x_T: Tensor) -> Tensor:
        """The trained tokens' values, [M]."""
        return torch.cat([x_T[:0], *self._runs(x_T)])

    def chunks(self, *tensors_T: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """What ``gather`` returns of each tensor, some ``CHUNK`` tokens at a time; not to be written to."""
        ends = np.cumsum(self._sizes[self._first :: 2], dtype=np.int64)
        cuts = np.searchsorted(ends, np.arange(CHUNK, self.count, CHUNK)) + 1
        bounds = [0, *dict.fromkeys(cuts.tolist()), len(ends)]
        runs = [self._runs(x_T) for x_T in tensors_T]
        for start, end in pairwise(bounds):
            if start < end:
                yield tuple(each[start] if end == start + 1 else torch.cat(each[start:end]) for each in runs)

    def scatter(self, x_M: Tensor) -> Tensor:
        """Values of the trained tokens at their places, 0 elsewhere; [T]."""
        trained = iter(torch.split(x_M, self._sizes[self._first :: 2]))
        zeros = x_M.new_zeros(max(self._sizes[1 - self._first :: 2], default=0))
        runs = [next(trained) if number % 2 == self._first else zeros[:size] for number, size in enumerate(self._sizes)]
        return torch.cat([x_M[:0], *runs])

    def fill(self, x_S: Tensor, lengths_S: Sequence[int]) -> Tensor:
        """``x_S`` at each trained token of its sequence, 0 elsewhere; [T].  No run may go on into a next sequence."""
        ends = np.cumsum(self._sizes, dtype=np.int64)[self._first :: 2]
        places = np.searchsorted(np.cumsum(lengths_S), ends)  # where a run ends, so does no earlier sequence
        values, filled, done = x_S.numpy(), np.empty(len(self.mask_T), dtype=x_S.numpy().dtype), 0
        for end, size, place in zip(ends.tolist(), self._sizes[self._first :: 2], places.tolist(), strict=True):
            filled[done : end - size], filled[end - size : end], done = 0, values[place], end
        filled[done:] = 0
        return torch.from_numpy(filled)

    def _runs(self, x_T: Tensor) -> tuple[Tensor, ...]:
        return torch.split(x_T, self._sizes)[self._first :: 2]


@dataclass(frozen=True)
class Spread:
    """Of values.  variance: over their count."""

    mean: float
    variance: float
    low: float
    high: float


def spread(chunks: Iterable[Tensor]) -> Spread:
    """Mean, variance and bounds of at least one value.

    Sums are in float64, of differences from the first value: values that are all equal vary by exactly 0.
    """
    found, count, first = [], 0, None
    for x in chunks:
        first = float(x[0]) if first is None else first
        exact = x.double() - first
        found.append(torch.stack([exact.sum(), exact.dot(exact), *x.aminmax()]))
        count += len(x)
    assert first is not None, "of no value there is no mean"
    found_C4 = torch.stack(found)
    mean, square = (found_C4[:, :2].sum(0) / count).tolist()
    low, high = found_C4[:, 2].min(), found_C4[:, 3].max()
    return Spread(first + mean, max(0.0, square - mean * mean), float(low), float(high))


def exact_sum(chunks: Iterable[Tensor]) -> float:
    """In float64."""
    return float(sum(float(x.sum(dtype=torch.float64)) for x in chunks))


def discounted_sums(x_M: Tensor, counts_S: Tensor, factor: float) -> Tensor:
    """``y[t] = x[t] + factor * y[t + 1]`` within each sequence, [M].

    x_M: values of the trained tokens alone, sequence after sequence; counts_S of them each.  ``_SIDE_BY_SIDE``
    sequences at a time are padded to their longest, and take each step together.
    """
    summed = [x_M[:0]]
    for rows in _batches(torch.split(x_M, counts_S.tolist())):
        padded = pad_sequence(rows, batch_first=True).t().contiguous()  # a step's values stand side by side
        for position in reversed(range(len(padded) - 1)):
            padded[position].add_(padded[position + 1], alpha=factor)
        again = padded.t().contiguous()
        summed += [row[: len(whole)] for row, whole in zip(again, rows, strict=True)]
    return torch.cat(summed)


def _batches(rows: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    for start in range(0, len(rows), _SIDE_BY_SIDE):
        yield list(rows[start : start + _SIDE_BY_SIDE])
