"""Self-attention of a model whose layers with a window rotate by other frequencies than those without (Gemma 3)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mcore_rl.training.rope import of_set
from mcore_rl.training.rotation import RotatedSelfAttention


class TwoBaseAttention(RotatedSelfAttention):
    """``RotatedSelfAttention`` that takes its own half of the cosines and sines that all layers are given.

    The rotary embedding has both sets of frequencies (``rope.frequency_sets``), the second for layers with a window.
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
