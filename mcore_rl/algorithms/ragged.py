"""Sequences laid end to end: sums over each, values at each of its tokens, discounted sums from each token on.

S sequences, T packed tokens, M of them trained.  No result of one sequence depends on another, and no Python loop runs
over tokens: the controller does this for a whole step at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

_SIDE_BY_SIDE = 1024  # bounds the padding that one long response costs; fewer would only mean more steps


def sequence_sums(x_T: Tensor, lengths: Sequence[int] | Tensor) -> Tensor:
    """Sum of the floating ``x_T`` over each sequence, [S]; 0 for a length of 0."""
    lengths_S = torch.as_tensor(lengths, dtype=torch.int64)
    return torch.segment_reduce(x_T, "sum", lengths=lengths_S, unsafe=True)  # unsafe: lengths are not checked again


def sequence_counts(mask_T: Tensor, lengths_S: Sequence[int]) -> Tensor:
    """Trained tokens of each sequence, int64 [S]."""
    return torch.stack([mask.sum() for mask in torch.split(mask_T, list(lengths_S))])


def at_tokens(x_S: Tensor, lengths_S: Sequence[int]) -> Tensor:
    """``x_S`` at each token of its sequence, [T]."""
    return torch.cat([x.expand(length) for x, length in zip(x_S, lengths_S, strict=True)])


def last_trained(mask_T: Tensor, counts_S: Tensor) -> Tensor:
    """Where in T the last trained token of each sequence that has one stands; int64, ascending."""
    ends_S = counts_S.cumsum(0) - 1
    return mask_T.nonzero().squeeze(1)[ends_S[counts_S > 0]]


def discounted_sums(x_M: Tensor, counts_S: Tensor, factor: float) -> Tensor:
    """``y[t] = x[t] + factor * y[t + 1]`` within each sequence, [M].

    x_M: values of the trained tokens alone, sequence after sequence; counts_S of them each.  ``_SIDE_BY_SIDE``
    sequences at a time are padded to their longest, and take each step together.
    """
    summed = [x_M[:0]]
    for rows in _batches(torch.split(x_M, counts_S.tolist())):
        padded = pad_sequence(rows, batch_first=True)
        for position in reversed(range(padded.shape[1] - 1)):
            padded[:, position].add_(padded[:, position + 1], alpha=factor)
        summed += [row[: len(whole)] for row, whole in zip(padded, rows, strict=True)]
    return torch.cat(summed)


def _batches(rows: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    for start in range(0, len(rows), _SIDE_BY_SIDE):
        yield list(rows[start : start + _SIDE_BY_SIDE])
