"""The output projection of an expert with biases (gpt-oss)."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor


class ExpertOutputLinear(RowParallelLinear):  # type: ignore[misc]  # Megatron is untyped
    """Megatron's ``RowParallelLinear``, whose output may be changed in place, and whose bias is reduced as its weight.

    An MLP of experts adds the bias, weighed by the router, in place (transformer/mlp.py:247, 0.16.1).  With tp=1 and
    ep=1 the output is its own sum over ranks, which autograd takes for a view and refuses to let change.

    Megatron marks the bias for a sum over tensor ranks (tensor_parallel/layers.py:1228).  An expert is whole on a rank
    (etp=1), and those that hold it too sum its gradients already, so the bias would get several times its own.  It is
    marked as the weight is, so that the gradient norm counts it on every tensor rank: each holds other experts, or
    another part of the optimizer's state.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bias.sequence_parallel = False
        set_tensor_model_parallel_attributes(self.bias, is_parallel=True, dim=0, stride=1)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Megatron's argument and results."""
        output, bias = super().forward(input_)
        return (output.clone() if output._is_view() else output), bias
