"""The rotation of queries and keys, and Megatron's self-attention with it: plain, gated, by two sets of frequencies.

Megatron's own (models/common/embeddings/rope_utils.py, ``apply_rotary_pos_emb``) makes cosines and sines of the angles
once more in each layer, for queries and for keys; cuts those of packed sequences one by one, whose lengths it reads
back; and moves a head's numbers some thirteen times, forward and backward, in as many kernels each.  Here cosines and
sines come ready from the embedding, and the rotation is one kernel on accelerators.  Its bits are Megatron's.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from mcore_rl.training.one_kernel import OneKernel
from mcore_rl.training.rope import of_set


class RotatedSelfAttention(SelfAttention):  # type: ignore[misc]  # Megatron is untyped
    """Megatron's ``SelfAttention``, which is given cosines and sines in the place of angles (``rope.py``).

    It rotates as soon as there are queries and keys.  Megatron, whose rotation comes later, then finds nothing to do.
    """

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, *, rotary_pos_emb: Tensor, **rest: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Megatron's arguments and results.

        rotary_pos_emb: [rows of this context rank, 1, 1, 2 * frequencies], cosines and then sines.  Megatron hands
        ``key_value_states``, which only cross-attention has, on to ``get_query_key_value_tensors``.
        """
        out: tuple[Tensor, Tensor | None] = super().forward(
            hidden_states, attention_mask, key_value_states=rotary_pos_emb, **rest
        )
        return out

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: Tensor, **options: Any
    ) -> tuple[Tensor, ...]:
        """Query, key, value, and the gate if there is one, [s, b, heads, head_dim].  key_value_states: see above."""
        query, key, *others = super().get_query_key_value_tensors(hidden_states, None, **options)
        if not self.rotates:
            return query, key, *others
        cos, sin = key_value_states.chunk(2, dim=-1)
        query, key = (rotate(each, cos, sin, interleaved=self.config.rotary_interleaved) for each in (query, key))
        return query, key, *others

    @property
    def rotates(self) -> bool:
        """Whether the layer rotates at all."""
        skipped = self.config.no_rope_freq
        return not (skipped and skipped[self.layer_number - 1])


class GatedSelfAttention(RotatedSelfAttention):
    """``RotatedSelfAttention`` with ``attention_output_gate`` (Qwen3-Next).

    With more tensor ranks than key/value heads Megatron gives each rank the query heads that are its own, and the gates
    of all heads that share its key (megatron-core 0.16.1, transformer/attention.py:1470 and :1488): here its own ones.
    0.19.2 gives it these (:1931), and needs no such class.
    """

    def get_query_key_value_tensors(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        """Query, key, value and gate of this rank's heads, [s, b, heads, head_dim]; Megatron's arguments."""
        query, key, value, gate = super().get_query_key_value_tensors(*args, **options)
        first = self.pg_collection.tp.rank() * query.shape[2] % gate.shape[2]
        return query, key, value, gate[:, :, first : first + query.shape[2]]


class TwoBaseAttention(RotatedSelfAttention):
    """``RotatedSelfAttention`` whose layers with a window rotate by other frequencies than those without (Gemma 3).

    The rotary embedding has both sets (``rope.frequency_sets``), the second for layers with a window.
    """

    @property
    def frequency_set(self) -> int:
        """Which set of frequencies the layer rotates by."""
        return int(self.core_attention.window is not None)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, *, rotary_pos_emb: Tensor, **rest: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Megatron's arguments and results."""
        own = of_set(rotary_pos_emb, self.frequency_set, 2)
        out: tuple[Tensor, Tensor | None] = super().forward(hidden_states, attention_mask, rotary_pos_emb=own, **rest)
        return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate the pairs of the last dimension: pair i is (2i, 2i + 1) if interleaved, else (i, i + pairs).

    cos, sin: [..., pairs], of x's dtype.  Of x's last dimension the first 2 * pairs elements are rotated, the others
    are passed on.  The result holds all first elements, then all second ones, either way, as in transformers
    (models/deepseek_v3/modeling_deepseek_v3.py, ``apply_rotary_pos_emb_interleave``): the order does not matter as long
    as queries and keys have the same one.
    """
    out: Tensor = _Rotation.apply(x, cos, sin, interleaved)  # type: ignore[no-untyped-call]
    return out


class _Rotation(torch.autograd.Function):
    """Keeps nothing for backward but cosines and sines, which all layers share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.interleaved = interleaved
        ctx.save_for_backward(cos, sin)
        out: Tensor = rotated(x, cos, sin, interleaved)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return rotated_back(grad, *ctx.saved_tensors, ctx.interleaved), None, None, None


@OneKernel
def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The rotation itself; see ``rotate``."""
    turned, *passed = _parts(x, cos)
    first, second = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, *passed], dim=-1)


@OneKernel
def rotated_back(grad: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The gradient of ``rotate``'s x: its result's, turned the other way."""
    turned, *passed = _parts(grad, cos)
    first, second = turned.chunk(2, dim=-1)
    pairs = [first * cos + second * sin, second * cos - first * sin]
    if interleaved:
        pairs = [torch.stack(pairs, dim=-1).flatten(-2)]
    return torch.cat([*pairs, *passed], dim=-1)


def _parts(x: Tensor, cos: Tensor) -> tuple[Tensor, ...]:
    """What is rotated of ``x``, and what is passed on, if there is any."""
    width = 2 * cos.shape[-1]
    return (x,) if width == x.shape[-1] else x.tensor_split((width,), dim=-1)
