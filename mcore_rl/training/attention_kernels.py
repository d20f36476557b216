"""Causal attention of packed sequences by the kernels that PyTorch has: SDPA a sequence at a time, or one flash call.

``blocks`` and ``visible`` define, for every kernel of ours, which keys a run of queries sees.  Soft-capped scores and
sinks have no kernel; see ``block_attention``.

Everywhere: query_T [t, heads, head_dim] are the rows of this rank, key_T and value_T [T, groups, head_dim] the rows of
whole sequences in order; ``packed.segments`` lists which queries see which keys.  A window of W tokens lets a query see
itself and the W - 1 tokens before it; None is no window.  The result is [t, heads, value head_dim].
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl, list_flash_attention_impls
from torch.nn.attention.varlen import varlen_attn

from mcore_rl.parallel.device import have_flash_attention_3
from mcore_rl.training.sequences import PackedSequences, boundaries

# What varlen_attn's flash kernels take (torch 2.11 to 2.13, flash_attn/flash_api.cpp).
_VARLEN_DTYPES = (torch.bfloat16, torch.float16)
_VARLEN_HEAD_DIM_MULTIPLE = 8
_VARLEN_MAX_HEAD_DIM = 256

_SHORTEST_BLOCK = 128  # queries of one SDPA call under a window; below that its overhead shows


def blocks(num_queries: int, num_keys: int, window: int | None, rows: int) -> Iterator[tuple[slice, slice]]:
    """Runs of at most ``rows`` queries, each with the range of keys that any of them sees, in order.

    The last query sees up to the last key, in all and within each block.  A block leaves out keys that the causal mask
    or the window hides from all its queries.
    """
    before = num_keys - num_queries
    for start in range(0, num_queries, rows):
        stop = min(start + rows, num_queries)
        first_key = 0 if window is None else max(0, before + start - window + 1)
        yield slice(start, stop), slice(first_key, before + stop)


def visible(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """Which keys of a block each of its queries sees; bool [num_queries, num_keys]."""
    before = num_keys - num_queries
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(before)
    return mask if window is None else mask.triu(before - window + 1)


def attend_causal(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None) -> Tensor:
    """[q, heads, head_dim] from one run of queries and the [k, groups, head_dim] keys that its last query may see."""
    num_queries = query.shape[0]
    num_keys = key.shape[0]
    mask = None
    if num_queries != num_keys or (window is not None and window < num_keys):
        # is_causal would align the first query with the first key; here the last belongs to the last.  An explicit mask
        # is what torch.nn.attention.bias.causal_lower_right becomes on the CPU, and is faster than going through it.
        mask = visible(num_queries, num_keys, window, query.device)
    out = F.scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        key.transpose(0, 1).unsqueeze(0),
        value.transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.squeeze(0).transpose(0, 1)


def _attend_run(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
    """``attend_causal`` in blocks without the keys that the window hides: about 1.25 W keys a query instead of k."""
    num_queries = query.shape[0]
    num_keys = key.shape[0]
    if window is None or num_keys <= window:
        return attend_causal(query, key, value, scale)
    rows = max(_SHORTEST_BLOCK, window // 4)
    parts = zip(torch.split(query, rows), blocks(num_queries, num_keys, window, rows), strict=True)
    return torch.cat([attend_causal(part, key[keys], value[keys], scale, window) for part, (_, keys) in parts])


def attend_one_by_one(
    query_T: Tensor, key_T: Tensor, value_T: Tensor, packed: PackedSequences, scale: float, window: int | None = None
) -> Tensor:
    """One SDPA call per segment, or per block of it under a window: any device and dtype.

    On the CPU this beats one call over padded or block-masked sequences, except for sequences of a dozen tokens.
    """
    segments = packed.segments
    queries = torch.split(query_T, list(segments.query_lengths))
    keys, values = (rows_of_sequences(x, packed) for x in (key_T, value_T))
    runs = zip(queries, segments.sequences, segments.key_lengths, strict=True)
    return torch.cat([_attend_run(query, keys[i][:seen], values[i][:seen], scale, window) for query, i, seen in runs])


def rows_of_sequences(x_T: Tensor, packed: PackedSequences) -> list[Tensor]:
    """The rows of each sequence, a trunk's before those of each of its branches.

    ``split`` and not slicing: the backward of a slice fills a whole [T, ...] gradient, once per sequence.
    """
    own = torch.split(x_T, list(packed.padded_lengths))
    trunks = packed.trunks or (None,) * len(own)
    return [rows if trunk is None else torch.cat([own[trunk], rows]) for rows, trunk in zip(own, trunks, strict=True)]


def varlen_can_run(query_T: Tensor, value_T: Tensor, packed: PackedSequences, window: int | None = None) -> bool:
    """Whether this device has a flash kernel that computes these segments; float32 and the CPU have none."""
    head_dim = query_T.shape[-1]
    take_flash_attention_3(query_T.device)
    return (
        query_T.device.type != "cpu"
        and query_T.dtype in _VARLEN_DTYPES
        and head_dim == value_T.shape[-1]
        and head_dim % _VARLEN_HEAD_DIM_MULTIPLE == 0
        and head_dim <= _VARLEN_MAX_HEAD_DIM
        and (packed.segments.square or aligns_last_query(query_T.device, query_T.dtype))
        and (window is None or honours_window(query_T.device, query_T.dtype))
    )


@lru_cache(maxsize=4)
def take_flash_attention_3(device: torch.device) -> bool:
    """Whether torch's flash calls run FlashAttention 3 from here on: where it is installed and made for ``device``.

    By torch's own switch, which puts it behind the operators of ``varlen_attn``, with their arguments
    (torch/nn/attention/_fa3.py, 2.13): so it is asked what every kernel is asked below.  A build for another torch
    cannot be loaded, and changes nothing.
    """
    if not have_flash_attention_3(device) or "FA3" not in list_flash_attention_impls():
        return False
    try:
        activate_flash_attention_impl("FA3")
    except (ImportError, OSError, RuntimeError) as problem:
        warnings.warn(f"FlashAttention 3 is installed and cannot be used: {problem}", stacklevel=2)
        return False
    return True


@lru_cache(maxsize=8)
def aligns_last_query(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether causal ``varlen_attn`` with more keys than queries lets the last query see the last key.

    NVIDIA's kernels do; AOTriton's, as torch calls them, align the first query with the first key.  torch promises
    neither, so the kernel is asked once: the first of 2 queries over 4 keys averages 0, 3 and 6 if it sees the first
    three, and is 0 if it sees the first alone.
    """
    return abs(_ask(device, dtype, num_queries=2, window=None) - 3.0) < 0.1


@lru_cache(maxsize=8)
def honours_window(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether ``varlen_attn`` hides the keys before its window: the last of 4 queries with W=2 averages 6 and 30."""
    return abs(_ask(device, dtype, num_queries=4, window=2) - 18.0) < 0.1


def _ask(device: torch.device, dtype: torch.dtype, num_queries: int, window: int | None) -> float:
    """The output of the first query (the last, under a window) over 4 keys of equal scores and values 0, 3, 6, 30."""
    query = torch.zeros(num_queries, 1, 64, device=device, dtype=dtype)
    key = torch.zeros(4, 1, 64, device=device, dtype=dtype)
    value = torch.tensor([0.0, 3.0, 6.0, 30.0], device=device, dtype=dtype)[:, None, None].repeat(1, 1, 64)
    limits = boundaries([num_queries], device), boundaries([4], device)
    with torch.no_grad():
        out = _varlen(query, key, value, *limits, num_queries, 4, scale=1.0, window=window)
    return float(out[0 if window is None else -1, 0, 0])


@lru_cache(maxsize=8)
def takes_groups(kernel: Callable[..., Any]) -> bool:
    """Whether ``varlen_attn`` says that it takes fewer heads of keys and values than of queries; torch 2.11's does not.

    Asked by its signature and not by a trial: a kernel that takes them without a word might read beyond their end.
    """
    return "enable_gqa" in inspect.signature(kernel).parameters


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_boundaries: Tensor,
    key_boundaries: Tensor,
    max_queries: int,
    max_keys: int,
    *,
    scale: float,
    window: int | None,
) -> Tensor:
    """Causal ``varlen_attn`` with a window of ``window`` tokens.

    A kernel that takes no groups gets each head of keys and values once for every query head that shares it: the same
    products, but autograd keeps ``heads / groups`` times their bytes.
    """
    heads = query.shape[1]
    groups = key.shape[1]
    grouped: dict[str, Any] = {}
    if takes_groups(varlen_attn):
        grouped["enable_gqa"] = heads != groups
    elif heads != groups:
        key, value = (x.repeat_interleave(heads // groups, dim=1) for x in (key, value))
    out = varlen_attn(
        query,
        key,
        value,
        query_boundaries,
        key_boundaries,
        max_queries,
        max_keys,
        scale=scale,
        # (keys to the left of a query's own, -1 for all; keys to the right)
        window_size=(-1 if window is None else window - 1, 0),
        **grouped,
    )
    assert isinstance(out, Tensor)
    return out


def attend_varlen(
    query_T: Tensor, key_T: Tensor, value_T: Tensor, packed: PackedSequences, scale: float, window: int | None = None
) -> Tensor:
    """One flash kernel over all segments, for accelerators in bf16 and fp16.

    Early and late chunks of one sequence are neighbours on a rank, so under context parallelism they go through the
    same call as two segments, each with its own copy of the keys that it sees: (2 cp + 1) / 2 cp times T rows.  So do
    branches, which have as many rows of keys as sequences that share nothing.  The kernel itself skips the tiles that a
    window hides.
    """
    segments = packed.segments
    if packed.trunks:  # not by ``key_rows``: their gradients would be added up in an order that changes
        key_T, value_T = (torch.cat(rows_of_sequences(x, packed)) for x in (key_T, value_T))
    elif not segments.square:
        key_T = key_T.index_select(0, packed.key_rows)
        value_T = value_T.index_select(0, packed.key_rows)
    return _varlen(
        query_T,
        key_T,
        value_T,
        packed.query_boundaries,
        packed.key_boundaries,
        max(segments.query_lengths),
        max(segments.key_lengths),
        scale=scale,
        window=window,
    )
