"""The output projection of an expert with biases (gpt-oss)."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes


class ExpertOutputLinear(RowParallelLinear):  # type: ignore[misc]  # Megatron is untyped
    """Megatron's ``RowParallelLinear``, whose bias is reduced as its weight.

    Megatron marks the bias for a sum over tensor ranks (tensor_parallel/layers.py:1228).  An expert is whole on a rank
    (etp=1), and those that hold it too sum its gradients already, so the bias would get several times its own.  It is
    marked as the weight is, so that the gradient norm counts it on every tensor rank: each holds other experts, or
    another part of the optimizer's state.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bias.sequence_parallel = False
        set_tensor_model_parallel_attributes(self.bias, is_parallel=True, dim=0, stride=1)
