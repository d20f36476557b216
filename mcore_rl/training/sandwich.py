"""The norm behind attention and MLP, before the residual sum, which makes a layer a sandwich of norms (Gemma 2).

It lives in the last linear of either, where Megatron-Bridge keeps it too: ``self_attention.linear_proj.post_layernorm``
and ``mlp.linear_fc2.post_layernorm``.
"""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel import RowParallelLinear
from torch import Tensor

from mcore_rl.training.norm import RMSNorm


class NormedRowParallelLinear(RowParallelLinear):  # type: ignore[misc]  # Megatron is untyped
    """A ``RowParallelLinear`` whose output, summed over tensor ranks, passes an RMSNorm.

    Under sequence parallelism each rank norms its own tokens; the norm's weight is whole on every rank and marked for
    the sum of its gradients (``norm.py``).  Takes ``RowParallelLinear``'s arguments.  Not for experts: their outputs
    are summed before a norm could see them.
    """

    def __init__(self, *args: Any, is_expert: bool = False, **kwargs: Any) -> None:
        assert not is_expert, "a norm of each expert's output is not a norm of their sum"
        super().__init__(*args, is_expert=is_expert, **kwargs)
        self.post_layernorm = RMSNorm(self.config, self.output_size, self.config.layernorm_epsilon)

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        """input_: [s, b, input_size / tp] to ([s, b, output_size], None); s / tp of it under sequence parallelism."""
        output, bias = super().forward(input_)
        assert bias is None, "a bias that is added later would come behind the norm"
        return self.post_layernorm(output), None
