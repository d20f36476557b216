"""Causal core attention of the local layer spec: packed (``thd``) or fixed-size (``sbhd``), with context parallelism.

Takes the place of Megatron's ``DotProductAttention``, which refuses packed sequences and context parallelism
(megatron-core 0.16.1, transformer/dot_product_attention.py:57 and :153), wherever Transformer Engine is not used.
Deliberately not here: dropout, biases, masks other than causal, decoding with a key/value cache.  Sliding windows and
logit soft caps would enter in ``_causal`` and ``_attend_varlen``, the two places that call a kernel.

Invariant: a token's output depends on the tokens before it in its own sequence and on nothing else; on the CPU it is
the same bit for bit whatever is packed beside it.

Under context parallelism all keys and values are gathered and every rank attends from its own queries
(arXiv:2407.21783, section 3.3.2): simple, exact, and cheap where key/value heads are few.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from mcore_rl.parallel.context import concatenated_ranges, gather_indices, split_indices

# What varlen_attn's flash kernels take (torch 2.13, flash_attn/flash_api.cpp).
_VARLEN_DTYPES = (torch.bfloat16, torch.float16)
_VARLEN_HEAD_DIM_MULTIPLE = 8
_VARLEN_MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class Segments:
    """The queries of one rank as runs of neighbours, each of which attends to the start of its sequence.

    Run n holds ``query_lengths[n]`` queries of sequence ``sequences[n]``.  The last of them sees the first
    ``key_lengths[n]`` keys of that sequence, the one before it one key less, and so on.
    """

    sequences: tuple[int, ...]
    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]

    @property
    def square(self) -> bool:
        """Whether every run is a whole sequence that attends to itself, which is so without context parallelism."""
        return self.query_lengths == self.key_lengths


@dataclass(kw_only=True)
class PackedSequences(PackedSeqParams):
    """Megatron's ``PackedSeqParams`` with the lengths kept as Python numbers, and what all layers derive from them.

    Reading ``cu_seqlens`` back would make the host wait for the device in every layer; everything here is derived at
    most once per microbatch.  Build it with ``of``.

    lengths: tokens of each sequence.  padded_lengths: those plus the padding at its end, over all context-parallel
    ranks; the sum is T.  cp, cp_rank: this rank's place in the context-parallel group.
    """

    lengths: tuple[int, ...]
    padded_lengths: tuple[int, ...]
    cp: int
    cp_rank: int
    device: torch.device

    @classmethod
    def of(
        cls, lengths: Sequence[int], padded_lengths: Sequence[int], cp: int, cp_rank: int, device: torch.device
    ) -> PackedSequences:
        """The record of rank ``cp_rank`` for sequences of ``lengths`` tokens that stand ``padded_lengths`` apart."""
        assert len(lengths) == len(padded_lengths), "one padded length per sequence"
        assert all(0 < real <= padded for real, padded in zip(lengths, padded_lengths, strict=True)), (
            f"lengths {tuple(lengths)} do not fit padded lengths {tuple(padded_lengths)}"
        )
        assert cp == 1 or all(padded % (2 * cp) == 0 for padded in padded_lengths), f"{padded_lengths} with cp={cp}"
        boundaries = _boundaries(padded_lengths, device)
        longest = max(padded_lengths)
        return cls(
            qkv_format="thd",
            # Padding counts as the end of its sequence.  That is harmless because attention is causal: no token sees
            # what follows it, so padding changes no real token, and its own output is trained by nobody.  It is also
            # what Transformer Engine is fastest with: it compares padded and real boundaries (the host waits unless
            # they are one tensor) and rules flash attention out where they differ.
            cu_seqlens_q=boundaries,
            cu_seqlens_kv=boundaries,
            cu_seqlens_q_padded=boundaries,
            cu_seqlens_kv_padded=boundaries,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            lengths=tuple(lengths),
            padded_lengths=tuple(padded_lengths),
            cp=cp,
            cp_rank=cp_rank,
            device=device,
        )

    @cached_property
    def segments(self) -> Segments:
        """The whole sequences without context parallelism, else the early and the late chunk of each."""
        if self.cp == 1:
            return Segments(tuple(range(len(self.padded_lengths))), self.padded_lengths, self.padded_lengths)
        sequences, queries, keys = [], [], []
        for index, length in enumerate(self.padded_lengths):
            chunk = length // (2 * self.cp)
            for position in (self.cp_rank, 2 * self.cp - 1 - self.cp_rank):
                sequences.append(index)
                queries.append(chunk)
                keys.append(chunk * (position + 1))
        return Segments(tuple(sequences), tuple(queries), tuple(keys))

    @cached_property
    def gather_T(self) -> Tensor:
        """Puts the concatenation of all ranks' rows in sequence order; int64 [T] on the device."""
        return gather_indices(self.padded_lengths, self.cp).to(self.device)

    @cached_property
    def scatter_T(self) -> Tensor:
        """The inverse of ``gather_T``: rank 0's rows, then rank 1's, and so on."""
        parts = [split_indices(self.padded_lengths, self.cp, rank) for rank in range(self.cp)]
        return torch.cat(parts).to(self.device)

    @cached_property
    def query_boundaries(self) -> Tensor:
        """Where each segment's queries start, and the end; int32 [segments + 1] on the device."""
        return _boundaries(self.segments.query_lengths, self.device)

    @cached_property
    def key_boundaries(self) -> Tensor:
        """Where each segment's keys start in ``key_rows``, and the end; int32 [segments + 1] on the device."""
        return _boundaries(self.segments.key_lengths, self.device)

    @cached_property
    def key_rows(self) -> Tensor:
        """Rows, in sequence order, of the keys that each segment sees, one segment after another; int64."""
        starts_S = _boundaries(self.padded_lengths, torch.device("cpu")).long()
        starts = starts_S[torch.tensor(self.segments.sequences)]
        return concatenated_ranges(starts, torch.tensor(self.segments.key_lengths)).to(self.device)


def _boundaries(lengths: Sequence[int], device: torch.device) -> Tensor:
    """``[0, lengths[0], lengths[0] + lengths[1], ...]``, int32: what flash kernels call cu_seqlens."""
    return F.pad(torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0)).to(device)


@lru_cache(maxsize=64)
def _fixed_size(num_sequences: int, length: int, cp: int, cp_rank: int, device: torch.device) -> PackedSequences:
    """Sequences of one length; cached because an unpacked microbatch carries no record that could hold it."""
    lengths = (length,) * num_sequences
    return PackedSequences.of(lengths, lengths, cp, cp_rank, device)


class PackedAttention(MegatronModule):
    """Causal attention; a drop-in for ``DotProductAttention`` in a ``ModuleSpec``, with its constructor's arguments.

    cp_comm_type is accepted and not used: keys and values are always gathered.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        assert dropout == 0, f"attention dropout is not supported (asked for {dropout})"
        assert attention_type == "self", f"self-attention only, not {attention_type}"
        assert config.window_size is None, "sliding windows are not supported"
        assert config.softmax_type == "vanilla", f"softmax type {config.softmax_type} is not supported"
        assert not config.apply_query_key_layer_scaling, "query-key layer scaling is not supported"
        _refuse_unless_causal(attn_mask_type)
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.layer_number = max(1, layer_number)
        self.attn_mask_type = attn_mask_type
        self.tp_group = pg_collection.tp  # MegatronModule.sharded_state_dict looks for it
        self.cp_group = pg_collection.cp
        self.softmax_scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attention of this rank's queries to the causal past of their own sequences.

        Packed (``packed_seq_params`` of format ``thd``): query [t, heads, head_dim], key and value
        [t, groups, head_dim] with t = T / cp rows; returns [t, heads * head_dim].  Otherwise: query
        [s, b, heads, head_dim], key and value [s, b, groups, head_dim] with s = length / cp; returns
        [s, b, heads * head_dim].  Under context parallelism rows are in zig-zag order (``parallel/context.py``).
        """
        assert attention_mask is None, "the mask is always causal: give none"
        assert attention_bias is None, "attention biases are not supported"
        _refuse_unless_causal(attn_mask_type or self.attn_mask_type)
        cp, cp_rank = self.cp_group.size(), self.cp_group.rank()
        if packed_seq_params is not None:
            assert packed_seq_params.qkv_format == "thd", f"format {packed_seq_params.qkv_format} is not supported"
            packed = _with_lengths(packed_seq_params, cp, cp_rank, query.device)
            return self._attend(query, key, value, packed).flatten(1)
        s, b = query.shape[:2]
        packed = _fixed_size(b, s * cp, cp, cp_rank, query.device)
        query_T, key_T, value_T = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
        out = self._attend(query_T, key_T, value_T, packed)
        return out.view(b, s, -1).transpose(0, 1).contiguous()

    def _attend(self, query_T: Tensor, key_T: Tensor, value_T: Tensor, packed: PackedSequences) -> Tensor:
        """[t, heads, head_dim] from this rank's rows of all three."""
        assert query_T.shape[0] * packed.cp == sum(packed.padded_lengths), (
            f"{query_T.shape[0]} rows on each of {packed.cp} ranks for sequences of {packed.padded_lengths}"
        )
        if packed.cp > 1:
            # One collective for both; their head dimensions may differ.
            both_T = torch.cat([key_T, value_T], dim=-1)
            both_T = _GatherRows.apply(  # type: ignore[no-untyped-call]
                both_T, packed.gather_T, packed.scatter_T, self.cp_group
            )
            key_T, value_T = torch.split(both_T, [key_T.shape[-1], value_T.shape[-1]], dim=-1)
        attend = _attend_varlen if _varlen_can_run(query_T, value_T, packed.segments) else _attend_one_by_one
        return attend(query_T, key_T, value_T, packed, self.softmax_scale)


def _refuse_unless_causal(attn_mask_type: AttnMaskType) -> None:
    # Megatron says padding_causal where padding tokens stand behind a sequence; to causal attention that is the same.
    causal = (AttnMaskType.causal, AttnMaskType.padding_causal)
    assert attn_mask_type in causal, f"causal attention only, not {attn_mask_type}"


def _with_lengths(params: PackedSeqParams, cp: int, cp_rank: int, device: torch.device) -> PackedSequences:
    """``params`` itself if it is ours, else ours with the lengths read from it (the host waits for the device)."""
    if isinstance(params, PackedSequences):
        assert (params.cp, params.cp_rank) == (cp, cp_rank), f"packed for rank {params.cp_rank} of {params.cp}"
        return params
    # As Megatron's rotary embedding chooses (transformer/attention.py:1082).
    boundaries = params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
    lengths = boundaries.diff().tolist()
    return PackedSequences.of(lengths, lengths, cp, cp_rank, device)


class _GatherRows(torch.autograd.Function):
    """[t, ...] of this rank to [T, ...] of all in sequence order; backward sums over ranks and keeps its own rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gather_T: Tensor, scatter_T: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(scatter_T)
        ctx.group = group
        joined = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(joined, x.contiguous(), group=group)
        return joined.index_select(0, gather_T)

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor, None, None, None]:
        (scatter_T,) = ctx.saved_tensors
        joined = grad_T.index_select(0, scatter_T)
        grad = joined.new_empty(joined.shape[0] // ctx.group.size(), *joined.shape[1:])
        dist.reduce_scatter_tensor(grad, joined, group=ctx.group)
        return grad, None, None, None


def _causal(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """[q, heads, head_dim] from one run of queries and the [k, groups, head_dim] keys that its last query sees."""
    num_queries, num_keys = query.shape[0], key.shape[0]
    mask = None
    if num_queries != num_keys:
        # is_causal would align the first query with the first key; here the last belongs to the last.  An explicit mask
        # is what torch.nn.attention.bias.causal_lower_right becomes on the CPU, and is faster than going through it.
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).tril(num_keys - num_queries)
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


def _attend_one_by_one(
    query_T: Tensor, key_T: Tensor, value_T: Tensor, packed: PackedSequences, scale: float
) -> Tensor:
    """One SDPA call per segment: any device and dtype.

    On the CPU this beats one call over padded or block-masked sequences, but for those of a dozen tokens.  ``split``
    and not slicing: the backward of a slice fills a whole [T, ...] gradient, once per sequence.
    """
    segments = packed.segments
    queries = torch.split(query_T, list(segments.query_lengths))
    keys, values = (torch.split(x, list(packed.padded_lengths)) for x in (key_T, value_T))
    runs = zip(queries, segments.sequences, segments.key_lengths, strict=True)
    return torch.cat([_causal(query, keys[i][:seen], values[i][:seen], scale) for query, i, seen in runs])


def _varlen_can_run(query_T: Tensor, value_T: Tensor, segments: Segments) -> bool:
    """Whether the flash kernel of this device computes just these segments; float32 and the CPU have none."""
    head_dim = query_T.shape[-1]
    return (
        query_T.device.type != "cpu"
        and query_T.dtype in _VARLEN_DTYPES
        and head_dim == value_T.shape[-1]
        and head_dim % _VARLEN_HEAD_DIM_MULTIPLE == 0
        and head_dim <= _VARLEN_MAX_HEAD_DIM
        and (segments.square or _aligns_last_query(query_T.device, query_T.dtype))
    )


@lru_cache(maxsize=8)
def _aligns_last_query(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether causal ``varlen_attn`` with more keys than queries lets the last query see the last key.

    NVIDIA's kernels do; AOTriton's, as torch calls them, align the first query with the first key.  torch promises
    neither, so the kernel is asked once: with equal scores, the first of 2 queries over 4 keys averages those it sees,
    here 3.0 if they are the first three and 0.0 if it is the first alone.
    """
    query = torch.zeros(2, 1, 64, device=device, dtype=dtype)
    key = torch.zeros(4, 1, 64, device=device, dtype=dtype)
    value = torch.tensor([0.0, 3.0, 6.0, 30.0], device=device, dtype=dtype)[:, None, None].repeat(1, 1, 64)
    with torch.no_grad():
        out = _varlen(query, key, value, _boundaries([2], device), _boundaries([4], device), 2, 4, scale=1.0)
    return abs(float(out[0, 0, 0]) - 3.0) < 0.1


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, query_boundaries: Tensor, key_boundaries: Tensor,
    max_queries: int, max_keys: int, *, scale: float,
) -> Tensor:  # fmt: skip
    """Causal ``varlen_attn``."""
    out = varlen_attn(
        query,
        key,
        value,
        query_boundaries,
        key_boundaries,
        max_queries,
        max_keys,
        scale=scale,
        window_size=(-1, 0),  # any number of keys to the left, none to the right
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(out, Tensor)
    return out


def _attend_varlen(query_T: Tensor, key_T: Tensor, value_T: Tensor, packed: PackedSequences, scale: float) -> Tensor:
    """One flash kernel over all segments, for accelerators in bf16 and fp16.

    Written from the source of torch 2.13 and not yet run on hardware.  Early and late chunks of one sequence are
    neighbours on a rank, so under context parallelism they go through the same call as two segments, each with its own
    copy of the keys that it sees: (2 cp + 1) / 2 cp times T rows.
    """
    segments = packed.segments
    if not segments.square:
        key_T, value_T = key_T.index_select(0, packed.key_rows), value_T.index_select(0, packed.key_rows)
    return _varlen(
        query_T,
        key_T,
        value_T,
        packed.query_boundaries,
        packed.key_boundaries,
        max(segments.query_lengths),
        max(segments.key_lengths),
        scale=scale,
    )
