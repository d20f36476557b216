"""transformers with dictated experts: each router's own formula, with its last ``torch.topk`` answered by others.

The weights of the dictated experts come from the family's own code, from its own scores, and have gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from mcore_rl.config.model import ModelConfig


class _Dictated(TorchFunctionMode):
    """``torch.topk`` over all experts answers ``choices_MK`` where it is not free.  ``own_MK``: what it would have."""

    def __init__(self, choices_MK: Tensor, free_M: Tensor, num_experts: int) -> None:
        super().__init__()
        self._choices_MK, self._free_M, self._num_experts = choices_MK, free_M, num_experts
        self.own_MK: Tensor | None = None

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        if func is not torch.topk or args[0].shape[-1] != self._num_experts:
            return answer
        self.own_MK = answer.indices
        choices_MK = torch.where(self._free_M[:, None], self.own_MK, self._choices_MK)
        return torch.return_types.topk((args[0].gather(-1, choices_MK), choices_MK))  # type: ignore[attr-defined]


class ForcedRoutes:
    """Dictates experts to ``reference``, sequence after sequence.

    differing, replayed: how many of the dictated choices the routers would not have made, and how many there were.
    """

    def __init__(self, reference: PreTrainedModel, model: ModelConfig) -> None:
        assert model.moe is not None
        self.differing = self.replayed = 0
        self._routing_TLK: Tensor | None = None
        for number, layer in enumerate(reference.model.layers):
            for name, module in layer.named_modules():
                if type(module).__name__.lower().endswith("topkrouter"):
                    assert "." in name
                    self._force(module, number, model.moe.num_experts)

    def dictate(self, routing_TLK: Tensor, free_T: Tensor) -> None:
        """For the next forward pass.  routing_TLK: of its tokens.  free_T: tokens that choose by themselves."""
        self._routing_TLK, self._free_T = routing_TLK.long(), free_T

    def _force(self, module: torch.nn.Module, layer: int, num_experts: int) -> None:
        forward = module.forward

        def dictated(hidden: Tensor, *args: Any) -> Any:
            assert self._routing_TLK is not None
            choices_MK = self._routing_TLK[:, layer]
            with _Dictated(choices_MK, self._free_T, num_experts) as mode:
                answer = forward(hidden, *args)
            assert mode.own_MK is not None, "the router did not ask for its best experts"
            for told, own, free in zip(choices_MK.tolist(), mode.own_MK.tolist(), self._free_T.tolist(), strict=True):
                if not free:
                    self.replayed += len(told)
                    self.differing += len(set(told) - set(own))
            return answer

        module.forward = dictated  # type: ignore[method-assign]
