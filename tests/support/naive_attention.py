"""Attention written out: one sequence and one head at a time, in float64, for every kernel of ours to be held against.

Tolerance: 1e-5 relative to the largest entry.  Float32 rounds at 6e-8; attention over 40 keys accumulates a few tens of
such errors, and measures 5e-7 here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

TOLERANCE = 1e-5
HEAD_DIM = 16
NAMES = ("output", "query grad", "key grad", "value grad", "sink grad")


def random_qkv(rows: int, heads: int, groups: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value and the gradient of the output [rows, heads * head_dim], all but the last leaves."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(rows, n, HEAD_DIM) for n in (heads, groups, groups)] + [(rows, heads * HEAD_DIM)]
    query, key, value, grad = (torch.randn(*shape, generator=generator) for shape in shapes)
    return query.requires_grad_(), key.requires_grad_(), value.requires_grad_(), grad


def naive(
    query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], padded: Sequence[int], scale: float,
    window: int | None = None, cap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """softmax(cap tanh(q k^T * scale / cap)) v with a causal mask and a window; rows of padding are zero.

    sinks: [heads], one more score of each softmax, without a value.
    """
    group_size = query.shape[1] // key.shape[1]
    out = query.new_zeros(query.shape)
    start = 0
    for length, width in zip(lengths, padded, strict=True):
        rows = slice(start, start + length)
        distance = torch.arange(length)[:, None] - torch.arange(length)
        hidden = (distance < 0) | (distance >= (length if window is None else window))
        for head in range(query.shape[1]):
            scores = query[rows, head] @ key[rows, head // group_size].T * scale
            if cap is not None:
                scores = cap * torch.tanh(scores / cap)
            scores = scores.masked_fill(hidden, -torch.inf)
            if sinks is not None:
                scores = torch.cat([scores, sinks[head].expand(length, 1)], dim=-1)
            out[rows, head] = scores.softmax(-1)[:, :length] @ value[rows, head // group_size]
        start += width
    return out.flatten(1)


def reference(
    qkv: Sequence[Tensor], grad: Tensor, lengths: Sequence[int], padded: Sequence[int],
    scale: float = HEAD_DIM**-0.5, window: int | None = None, cap: float | None = None, sinks: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """Output and gradients of q, k, v and, where there are, sinks, in float64."""
    leaves = [x.detach().double().requires_grad_() for x in (*qkv, *([] if sinks is None else [sinks]))]
    out = naive(*leaves[:3], lengths, padded, scale, window, cap, *leaves[3:])
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.double())]


def assert_close(tensors: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float = TOLERANCE) -> None:
    """Output and gradients agree, relative to the largest entry of each, or to 1, the size of the inputs."""
    assert len(tensors) == len(expected)
    for name, a, b in zip(NAMES, tensors, expected, strict=False):
        assert a.shape == b.shape, name
        error = (a.double() - b.double()).abs().max() / b.abs().max().clamp(min=1.0)
        assert error < tolerance, f"{name} differs by {error:.1e}"


def real_rows(lengths: Sequence[int], padded: Sequence[int]) -> Tensor:
    """Which rows are tokens and not padding."""
    return torch.cat([torch.arange(width) < length for length, width in zip(lengths, padded, strict=True)])
