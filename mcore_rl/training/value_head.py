"""The critic's head: one number per token instead of logits.

Only the last pipeline stage has it; it is never tied to the embedding, and is whole on every tensor rank.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor


class ValueHead(MegatronModule):
    """Linear map H -> 1 with the call signature of Megatron's output layer.

    forward: hidden states [s / tp, b, H] to (values [s, b, 1] in float32, None).
    """

    def __init__(
        self, config: TransformerConfig, tp_group: torch.distributed.ProcessGroup, device: torch.device
    ) -> None:
        super().__init__(config)
        self.tp_group = tp_group
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
        assert weight is None, "a critic's head is never tied to the embedding"
        values = torch.nn.functional.linear(hidden.float(), self.weight.float())
        if self.config.sequence_parallel:
            # Every tensor rank computes the same loss on all values, so a part's gradient is its slice, not the sum.
            values = gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return values, None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Megatron's description of the weight, which is whole on every tensor rank."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {}, sharded_offsets)
