"""Self-attention whose output a gate multiplies, where several tensor ranks share a key/value head (Qwen3-Next)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mcore_rl.training.rotation import RotatedSelfAttention


class GatedSelfAttention(RotatedSelfAttention):
    """``RotatedSelfAttention`` with ``attention_output_gate``.

    With more tensor ranks than key/value heads Megatron gives each rank the query heads that are its own, and the gates
    of all heads that share its key (megatron-core 0.16.1, transformer/attention.py:1470 and :1488): here its own ones.
    0.19.2 gives it these (:1931), and needs no such class.
    """

    def get_query_key_value_tensors(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        """Query, key, value and gate of this rank's heads, [s, b, heads, head_dim]; Megatron's arguments."""
        query, key, value, gate = super().get_query_key_value_tensors(*args, **options)
        first = self.pg_collection.tp.rank() * query.shape[2] % gate.shape[2]
        return query, key, value, gate[:, :, first : first + query.shape[2]]
