"""What takes the place of the output projection in the last pipeline stage: a value head, or nothing."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor


class HiddenHead(MegatronModule):
    """The identity with the call signature of Megatron's output layer, for a model whose last hidden states are wanted.

    forward: hidden states [s / tp, b, H] after the final norm to ([s, b, H], None).
    """

    def __init__(self, config: TransformerConfig, tp_group: torch.distributed.ProcessGroup) -> None:
        super().__init__(config)
        self.tp_group = tp_group

    def forward(
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """Hidden states of all positions of this context rank."""
        assert weight is None, "nothing here is tied to the embedding"
        if self.config.sequence_parallel:
            # Every tensor rank computes the same loss on all positions, so a part's gradient is its slice, not the sum.
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return hidden, None


class ValueHead(HiddenHead):
    """Linear map H -> 1, whole on every tensor rank: forward gives (values [s, b, 1] in float32, None)."""

    def __init__(
        self, config: TransformerConfig, tp_group: torch.distributed.ProcessGroup, device: torch.device
    ) -> None:
        super().__init__(config, tp_group)
        self.weight = torch.nn.Parameter(torch.empty(1, config.hidden_size, dtype=config.params_dtype, device=device))
        if config.perform_initialization:
            config.init_method(self.weight)
        # Each tensor rank sees its own part of the sequence, so the gradients of the parts must be summed:
        # megatron/core/distributed/finalize_model_grads.py, _allreduce_non_tensor_model_parallel_grads.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """Values of all positions of this context rank."""
        return super().forward(torch.nn.functional.linear(hidden.float(), self.weight.float()), weight)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Megatron's description of the weight, which is whole on every tensor rank."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {}, sharded_offsets)
