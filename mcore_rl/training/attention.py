"""Causal core attention of the local layer spec: packed (``thd``) or fixed-size (``sbhd``), with context parallelism.

Takes the place of Megatron's ``DotProductAttention``, which refuses packed sequences and context parallelism
(megatron-core 0.16.1, transformer/dot_product_attention.py:57 and :153), wherever Transformer Engine is not used.
Deliberately not here: dropout, biases, masks other than causal, decoding with a key/value cache.  The arithmetic is in
``attention_kernels`` and ``block_attention``.

Invariant: a token's output depends on the tokens before it in its own sequence and on nothing else; on the CPU it is
the same bit for bit whatever is packed beside it.

Under context parallelism all keys and values are gathered and every rank attends from its own queries
(arXiv:2407.21783, section 3.3.2): simple, exact, and cheap where key/value heads are few.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor

from mcore_rl.training.attention_kernels import attend_one_by_one, attend_varlen, varlen_can_run
from mcore_rl.training.block_attention import attend_in_blocks
from mcore_rl.training.sequences import PackedSequences, cached_on_device


@cached_on_device
def fixed_size(num_sequences: int, length: int, cp: int, cp_rank: int, device: torch.device) -> PackedSequences:
    """Sequences of one length; cached because an unpacked microbatch carries no record that could hold it."""
    lengths = (length,) * num_sequences
    return PackedSequences.of(lengths, lengths, cp, cp_rank, device)


class PackedAttention(MegatronModule):
    """Causal attention; a drop-in for ``DotProductAttention`` in a ``ModuleSpec``, with its constructor's arguments.

    layer_number: in the whole model, from 1; ``config.window_size`` (W - 1, 0) and ``config.window_attn_skip_freq``
    decide by it whether this layer has the sliding window.  soft_cap: ``cap * tanh(score / cap)`` before the softmax.
    ``config.softmax_type`` of "learnable": each of this rank's query heads has a sink, in the parameter
    ``softmax_offset``, as ``DotProductAttention`` and Transformer Engine name it.
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
        soft_cap: float | None = None,
    ) -> None:
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        assert dropout == 0, f"attention dropout is not supported (asked for {dropout})"
        assert attention_type == "self", f"self-attention only, not {attention_type}"
        assert config.softmax_type in ("vanilla", "learnable"), f"softmax type {config.softmax_type} is not supported"
        assert not config.apply_query_key_layer_scaling, "query-key layer scaling is not supported"
        _refuse_unless_causal(attn_mask_type)
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.layer_number = max(1, layer_number)
        self.attn_mask_type = attn_mask_type
        self.tp_group = pg_collection.tp  # MegatronModule.sharded_state_dict looks for it
        self.cp_group = pg_collection.cp
        self.soft_cap = soft_cap
        self.window: int | None = None
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, self.layer_number):
            assert config.window_size[1] == 0, f"a window of {config.window_size} sees the future"
            self.window = config.window_size[0] + 1
        self.softmax_scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // self.tp_group.size()
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
            # Megatron's own has no mark, and would be missing from the norm of the gradients on all ranks but one.
            set_tensor_model_parallel_attributes(self.softmax_offset, is_parallel=True, dim=0, stride=1)

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
        cp = self.cp_group.size()
        cp_rank = self.cp_group.rank()
        if packed_seq_params is not None:
            assert packed_seq_params.qkv_format == "thd", f"format {packed_seq_params.qkv_format} is not supported"
            packed = with_lengths(packed_seq_params, cp, cp_rank, query.device)
            return self._attend(query, key, value, packed).flatten(1)
        s, b = query.shape[:2]
        packed = fixed_size(b, s * cp, cp, cp_rank, query.device)
        query_T, key_T, value_T = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
        out = self._attend(query_T, key_T, value_T, packed)
        return out.view(b, s, -1).transpose(0, 1).contiguous()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Megatron's description of the sinks, which tensor ranks split; as ``DotProductAttention`` gives it."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"softmax_offset": 0}, sharded_offsets)

    def _attend(self, query_T: Tensor, key_T: Tensor, value_T: Tensor, packed: PackedSequences) -> Tensor:
        """[t, heads, head_dim] from this rank's rows of query, key and value."""
        assert query_T.shape[0] * packed.cp == sum(packed.padded_lengths), (
            f"{query_T.shape[0]} rows on each of {packed.cp} ranks for sequences of {packed.padded_lengths}"
        )
        if packed.cp > 1:
            # One collective for both; their head dimensions may differ.
            both_T = torch.cat([key_T, value_T], dim=-1)
            both_T = GatherRows.apply(  # type: ignore[no-untyped-call]
                both_T, packed.gather_T, packed.scatter_T, self.cp_group
            )
            key_T, value_T = torch.split(both_T, [key_T.shape[-1], value_T.shape[-1]], dim=-1)
        if self.soft_cap is not None or self.softmax_offset is not None:
            return attend_in_blocks(
                query_T,
                key_T,
                value_T,
                packed,
                self.softmax_scale,
                self.soft_cap,
                self.window,
                sinks=self.softmax_offset,
            )
        attend = attend_varlen if varlen_can_run(query_T, value_T, packed, self.window) else attend_one_by_one
        return attend(query_T, key_T, value_T, packed, self.softmax_scale, self.window)


def _refuse_unless_causal(attn_mask_type: AttnMaskType) -> None:
    # padding_causal means padding behind each sequence; causal attention never looks there.
    causal = (AttnMaskType.causal, AttnMaskType.padding_causal)
    assert attn_mask_type in causal, f"causal attention only, not {attn_mask_type}"


def with_lengths(params: PackedSeqParams, cp: int, cp_rank: int, device: torch.device) -> PackedSequences:
    """``params`` itself if it is ours, else ours with the lengths read from it (the host waits for the device)."""
    if isinstance(params, PackedSequences):
        assert (params.cp, params.cp_rank) == (cp, cp_rank), f"packed for rank {params.cp_rank} of {params.cp}"
        return params
    # As Megatron's rotary embedding chooses (transformer/attention.py:1082).
    boundaries = params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
    lengths = boundaries.diff().tolist()
    return PackedSequences.of(lengths, lengths, cp, cp_rank, device)


class GatherRows(torch.autograd.Function):
    """[t, ...] of this rank to [T, ...] of all in sequence order; backward sums over ranks and keeps its own rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gather_T: Tensor, scatter_T: Tensor, group: dist.ProcessGroup) -> Tensor:
        """gather_T, scatter_T: of the ``PackedSequences``.  group: the context-parallel ranks."""
        ctx.save_for_backward(scatter_T)
        ctx.group = group
        joined = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(joined, x.contiguous(), group=group)
        return joined.index_select(0, gather_T)

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor, None, None, None]:
        """See ``torch.autograd.Function.backward``."""
        (scatter_T,) = ctx.saved_tensors
        joined = grad_T.index_select(0, scatter_T)
        grad = joined.new_empty(joined.shape[0] // ctx.group.size(), *joined.shape[1:])
        dist.reduce_scatter_tensor(grad, joined, group=ctx.group)
        return grad, None, None, None
