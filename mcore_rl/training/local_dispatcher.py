"""The dispatcher of tokens that stay on their rank: sorts them by expert, and the host never waits for the device.

Megatron's copies the numbers of rows to the host although nothing is sent, and cuts the rows into chunks that are in
order already (``MoEAlltoAllTokenDispatcher``, 0.16.1 and 0.19.2); 0.16.1 selects rows by a mask, twice a layer, and the
host waits to know how many there are (moe_utils.py:369).  There are tokens times choices, which the host knows.

Invariant: rows, probabilities and sums are in Megatron's order, bit for bit.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import unpermute
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mcore_rl.training.grouped_experts import GroupedExperts


def keep_tokens_local(chunk: torch.nn.Module) -> None:
    """Give the layers of ``chunk`` a ``LocalDispatcher`` where no token leaves its rank.

    Not where Megatron's does more: fuses permutations, or overlaps shared experts.  Experts of Transformer Engine want
    their numbers of rows on the host.
    """
    for module in chunk.modules():
        if not isinstance(module, MoELayer) or not isinstance(module.experts, GroupedExperts):
            continue
        config = module.config
        stays = config.expert_model_parallel_size * config.expert_tensor_parallel_size == 1
        if stays and not config.moe_permute_fusion and not config.moe_shared_expert_overlap:
            module.token_dispatcher = LocalDispatcher(config)


class LocalDispatcher(MoETokenDispatcher):  # type: ignore[misc]  # Megatron is untyped
    """Sorts tokens by expert.  M tokens of K choices give M * K rows, one expert after another, in order of tokens."""

    def __init__(self, config: TransformerConfig) -> None:
        self.config = config

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """[s, b, hidden], bool [M, E], [M, E].  Returns (rows [M * K, hidden], their probabilities [M * K])."""
        self._shape = hidden_states.shape
        tokens_MH = hidden_states.view(-1, self._shape[-1])
        num_tokens, num_experts = routing_map.shape
        self._counts_E = routing_map.sum(dim=0)
        chosen_T2 = torch.nonzero_static(routing_map.T, size=num_tokens * self.config.moe_router_topk)
        expert_T, self._token_T = chosen_T2.unbind(1)
        probs_T = probs.flatten().gather(0, self._token_T * num_experts + expert_T)
        return tokens_MH.index_select(0, self._token_T), probs_T

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Both as they are."""
        return hidden_states, probs

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(rows, rows of each expert [E], probabilities); all on the device."""
        return hidden_states, self._counts_E, probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """The rows as they are."""
        return hidden_states

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """The rows as they are."""
        return hidden_states

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """The sum of each token's rows, [s, b, hidden]."""
        flat = torch.Size((self._shape.numel() // self._shape[-1], self._shape[-1]))
        summed: Tensor = unpermute(hidden_states, self._token_T, restore_shape=flat)
        return summed.view(self._shape)
