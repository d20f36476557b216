"""Causal attention with soft-capped scores or with sinks, which neither SDPA nor PyTorch's flash kernels have.

A cap bends the scores, ``cap * tanh(scale * q k / cap)`` (Gemma 2, arXiv:2408.00118, section 2).  A sink is a score z
of a head that takes part in its softmax and has no value (gpt-oss; arXiv:2309.17453 has a token for it).  Here blocks
of queries meet their keys in plain PyTorch, on any device, and backward computes the scores again from the saved sums
(as arXiv:2205.14135 does), so that no more than one block of scores is ever kept.  Scores are float32 whatever the
inputs are, and products of probabilities have the dtype of the inputs, as in flash kernels:

    s = cap tanh(scale q k / cap), or scale q k    l = log(sum exp s + exp z), or log sum exp s
    p = exp(s - l)                                 out = p v
    dv = p' dout      ds = p (dout v' - dout . out)      dq = ds (1 - (s / cap)^2) scale k
    dz = -sum exp(z - l) dout . out, over the tokens
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mcore_rl.training.attention_kernels import blocks, rows_of_sequences, visible
from mcore_rl.training.sequences import PackedSequences, Segments

# Bytes of one block of scores; a few blocks are alive at once.  CPU: the last-level cache; accelerators: products long
# enough to hide their launches.
_BLOCK_BYTES_CPU = 4 * 2**20
_BLOCK_BYTES = 128 * 2**20


def attend_in_blocks(
    query_T: Tensor,
    key_T: Tensor,
    value_T: Tensor,
    packed: PackedSequences,
    scale: float,
    cap: float | None,
    window: int | None = None,
    *,
    sinks: Tensor | None = None,
    block_bytes: int | None = None,
) -> Tensor:
    """[t, heads, value head_dim]; arguments as in ``attention_kernels``.  cap: positive, or None.

    sinks: [heads], the score of each head's sink; None: no head has one.
    block_bytes: size of one block of scores, rounded to whole queries; None: by device.  It changes only the speed.
    Differentiable once.
    """
    assert cap is None or cap > 0, f"a cap of {cap} would turn every score into its opposite or nothing"
    if block_bytes is None:
        block_bytes = _BLOCK_BYTES_CPU if query_T.device.type == "cpu" else _BLOCK_BYTES
    lengths = packed.padded_lengths
    if packed.trunks:
        lengths = packed.segments.key_lengths
        key_T, value_T = (torch.cat(rows_of_sequences(x, packed)) for x in (key_T, value_T))
    plan = tuple(_plan(packed.segments, lengths, query_T.shape[1], window, block_bytes))
    arguments = (query_T, key_T, value_T, sinks, plan, scale, cap, window)
    out: Tensor = _BlockAttention.apply(*arguments)  # type: ignore[no-untyped-call]
    return out


def _plan(
    segments: Segments, lengths: tuple[int, ...], heads: int, window: int | None, block_bytes: int
) -> Iterator[tuple[slice, slice]]:
    """Blocks of all segments: rows of ``query_T``, and the rows of ``key_T`` that they see.

    lengths: keys of each sequence, which stand end to end.
    """
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    first_query = 0
    runs = zip(segments.sequences, segments.query_lengths, segments.key_lengths, strict=True)
    for sequence, num_queries, num_keys in runs:
        width = num_keys if window is None else min(num_keys, 2 * window)
        rows = max(1, block_bytes // (4 * heads * width))
        if window is not None:
            rows = min(rows, window)  # a longer block would include keys that most of its queries do not see
        for queries, keys in blocks(num_queries, num_keys, window, rows):
            yield (
                slice(first_query + queries.start, first_query + queries.stop),
                slice(starts[sequence] + keys.start, starts[sequence] + keys.stop),
            )
        first_query += num_queries


class _BlockAttention(torch.autograd.Function):
    """A block inside has shape [G, n, ...]: G groups of heads that share keys, n = heads per group * queries."""

    @staticmethod
    def forward(
        ctx: Any,
        query_T: Tensor,
        key_T: Tensor,
        value_T: Tensor,
        sinks: Tensor | None,
        plan: tuple[tuple[slice, slice], ...],
        scale: float,
        cap: float | None,
        window: int | None,
    ) -> Tensor:
        out_T = query_T.new_empty(*query_T.shape[:2], value_T.shape[-1])
        precise = torch.promote_types(query_T.dtype, torch.float32)
        log_sum_T = query_T.new_empty(*query_T.shape[:2], 1, dtype=precise)
        groups = key_T.shape[1]
        for queries, keys in plan:
            scores = _scores(_grouped(query_T[queries], groups), _grouped(key_T[keys], groups), scale, cap)
            _hide(scores, queries, keys, window)
            log_sum = scores.logsumexp(-1, keepdim=True)
            if sinks is not None:
                log_sum = torch.logaddexp(log_sum, _of_rows(sinks, queries, groups).to(precise))
            probabilities = scores.sub_(log_sum).exp_().to(value_T.dtype)
            _put(out_T[queries], torch.bmm(probabilities, _grouped(value_T[keys], groups)))
            _put(log_sum_T[queries], log_sum)
        ctx.save_for_backward(query_T, key_T, value_T, sinks, out_T, log_sum_T)
        ctx.plan = plan
        ctx.scale = scale
        ctx.cap = cap
        ctx.window = window
        return out_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out_T: Tensor) -> tuple[Tensor | None, ...]:
        query_T, key_T, value_T, sinks, out_T, log_sum_T = ctx.saved_tensors
        grad_query_T = torch.empty_like(query_T)
        # Many blocks add to one key.
        grad_key_T, grad_value_T = (torch.zeros_like(x, dtype=log_sum_T.dtype) for x in (key_T, value_T))
        groups = key_T.shape[1]
        mean_T = (grad_out_T.to(log_sum_T.dtype) * out_T).sum(-1, keepdim=True)
        grad_sinks = None
        if sinks is not None:
            kept_TH1 = (sinks.to(log_sum_T.dtype)[:, None] - log_sum_T).exp()
            grad_sinks = (kept_TH1 * mean_T).sum((0, 2)).neg().to(sinks.dtype)
        for queries, keys in ctx.plan:
            query, key, value = (_grouped(x, groups) for x in (query_T[queries], key_T[keys], value_T[keys]))
            grad_out, log_sum, mean = (_grouped(x[queries], groups) for x in (grad_out_T, log_sum_T, mean_T))
            scores = _scores(query, key, ctx.scale, ctx.cap)
            slope = ctx.scale
            if ctx.cap is not None:
                slope = (scores / ctx.cap).square_().neg_().add_(1.0).mul_(ctx.scale)
            _hide(scores, queries, keys, ctx.window)
            probabilities = scores.sub_(log_sum).exp_()
            grad_scores = _product(grad_out, value.transpose(1, 2)).sub_(mean).mul_(probabilities).mul_(slope)
            grad_scores = grad_scores.to(query.dtype)
            probabilities = probabilities.to(query.dtype)
            _put(grad_query_T[queries], torch.bmm(grad_scores, key))
            grad_key_T[keys] += _product(grad_scores.transpose(1, 2), query).transpose(0, 1)
            grad_value_T[keys] += _product(probabilities.transpose(1, 2), grad_out).transpose(0, 1)
        grads = (grad_query_T, grad_key_T.to(key_T.dtype), grad_value_T.to(value_T.dtype), grad_sinks)
        return (*grads, None, None, None, None)


def _grouped(rows: Tensor, groups: int) -> Tensor:
    """[q, heads, d] to [G, heads per group * q, d]: Megatron keeps heads that share keys side by side."""
    return rows.unflatten(1, (groups, -1)).permute(1, 2, 0, 3).flatten(1, 2)


def _of_rows(of_heads: Tensor, queries: slice, groups: int) -> Tensor:
    """[heads] to [G, heads per group * q, 1], as ``_grouped``."""
    num_queries = queries.stop - queries.start
    return _grouped(of_heads.expand(num_queries, -1).unsqueeze(-1), groups)


def _put(rows: Tensor, block: Tensor) -> None:
    """The inverse of ``_grouped``, into ``rows``."""
    num_rows, heads, width = rows.shape
    groups = block.shape[0]
    rows.unflatten(1, (groups, heads // groups)).copy_(block.view(groups, -1, num_rows, width).permute(2, 0, 1, 3))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of [G, m, k] and [G, k, n], summed up and returned in float32 (float64 of float64)."""
    if a.dtype in (torch.float32, torch.float64):
        return torch.bmm(a, b)
    if a.device.type == "cpu":
        return torch.bmm(a.float(), b.float())
    return torch.bmm(a, b, out_dtype=torch.float32)  # accelerators only (torch 2.13)


def _scores(query: Tensor, key: Tensor, scale: float, cap: float | None) -> Tensor:
    if cap is None:
        return _product(query, key.transpose(1, 2)).mul_(scale)
    return _product(query, key.transpose(1, 2)).mul_(scale / cap).tanh_().mul_(cap)


def _hide(scores: Tensor, queries: slice, keys: slice, window: int | None) -> None:
    """-inf where a query does not see a key; in place."""
    num_queries = queries.stop - queries.start
    num_keys = keys.stop - keys.start
    seen = visible(num_queries, num_keys, window, scores.device)
    scores.unflatten(1, (-1, num_queries)).masked_fill_(~seen, -torch.inf)
