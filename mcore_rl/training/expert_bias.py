"""The output projection of an expert with biases (gpt-oss)."""

from __future__ import annotations

from megatron.core.tensor_parallel import RowParallelLinear
from torch import Tensor


class ExpertOutputLinear(RowParallelLinear):  # type: ignore[misc]  # Megatron is untyped
    """Megatron's ``RowParallelLinear``, whose output may be changed in place.

    An MLP of experts adds the bias, weighed by the router, in place (transformer/mlp.py:247, 0.16.1).  With tp=1 and
    ep=1 the output is its own sum over ranks, which autograd takes for a view and refuses to let change.
    """

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Megatron's argument and results."""
        output, bias = super().forward(input_)
        return (output.clone() if output._is_view() else output), bias
