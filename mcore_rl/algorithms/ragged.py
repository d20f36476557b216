"""Sequences laid end to end: sums over each, values at each of its tokens, discounted sums from each token on.

S sequences, T packed tokens, M of them trained.  No result of one sequence depends on another, and no Python loop runs
over tokens: the controller does this for a whole step at once, on the CPU.  A step may have 10^8 tokens, where what
costs is the memory that is written for the first time: intermediate results are made ``CHUNK`` tokens at a time, and
whole sequences are copied as slices instead of being gathered by index.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
        changes = np.flatnonzero(mask[1:] != mask[:-1]) + 1
        self._sizes: list[int] = np.diff(changes, prepend=0, append=len(mask)).tolist()
        self.count = int(np.count_nonzero(mask))
        self._first = 0 if len(mask) and mask[0] else 1  # runs are trained and untrained in turn

    def gather(self, x_T: Tensor) -> Tensor:
        """The trained tokens' values, [M]."""
        return torch.cat([x_T[:0], *torch.split(x_T, self._sizes)[self._first :: 2]])

    def scatter(self, x_M: Tensor) -> Tensor:
        """Values of the trained tokens at their places, 0 elsewhere; [T]."""
        trained = iter(torch.split(x_M, self._sizes[self._first :: 2]))
        zeros = x_M.new_zeros(max(self._sizes[1 - self._first :: 2], default=0))
        runs = [next(trained) if number % 2 == self._first else zeros[:size] for number, size in enumerate(self._sizes)]
        return torch.cat([x_M[:0], *runs])


@dataclass(frozen=True)
class Spread:
    """Of values.  variance: over their count."""

    mean: float
    variance: float
    low: float
    high: float


def spread(x_M: Tensor) -> Spread:
    """Mean, variance and bounds of at least one value.  Sums are in float64."""
    mean = exact_sum(x_M) / len(x_M)
    squares = sum(float((x - mean).square_().sum(dtype=torch.float64)) for x in torch.split(x_M, CHUNK))
    low, high = x_M.aminmax()
    return Spread(mean, squares / len(x_M), float(low), float(high))


def exact_sum(x_M: Tensor) -> float:
    """In float64."""
    return float(sum(float(x.sum(dtype=torch.float64)) for x in torch.split(x_M, CHUNK)))


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
