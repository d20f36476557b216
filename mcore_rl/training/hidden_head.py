"""What takes the place of the output projection of a model whose last hidden states are wanted, not its logits."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class HiddenHead(MegatronModule):
    """The identity with the call signature of Megatron's output layer; it has no parameters.

    forward: hidden states [s / tp, b, H] after the final norm to ([s, b, H], None).
    """

    def __init__(self, config: TransformerConfig, tp_group: torch.distributed.ProcessGroup) -> None:
        super().__init__(config)
        self.tp_group = tp_group

    def forward(
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """Hidden states of all positions of this context rank."""
        assert weight is None, "there is no output projection that could be tied to the embedding"
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return hidden, None
