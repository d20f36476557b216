"""The norm behind attention and MLP, before the residual sum, which makes a layer a sandwich of norms (Gemma 2).

It is part of the last linear of each, as in Megatron-Bridge: ``self_attention.linear_proj.post_layernorm`` and
``mlp.linear_fc2.post_layernorm``.
"""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel import RowParallelLinear
from torch import Tensor

from mcore_rl.training.norm import RMSNorm


class NormedRowParallelLinear(RowParallelLinear):  # type: ignore[misc]  # Megatron is untyped
    """A ``RowParallelLinear`` whose output, summed over tensor ranks, passes an RMSNorm.

    Under sequence parallelism each rank norms its own tokens; the norm's weight is whole on every rank and marked for
    the sum of its gradients (``norm.py``).  Takes ``RowParallelLinear``'s arguments.  Not for experts: the norm would
    have to come after the sum of their outputs.
    """

    def __init__(self, *args: Any, is_expert: bool = False, **kwargs: Any) -> None:
        assert not is_expert, "a norm of each expert's output is not a norm of their sum"
        super().__init__(*args, is_expert=is_expert, **kwargs)
        self.post_layernorm = RMSNorm(self.config, self.output_size, self.config.layernorm_epsilon)

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        """input_: [s, b, input_size / tp].  Returns ([s, b, output_size], None); s / tp under sequence parallelism."""
        output, bias = super().forward(input_)
        assert bias is None, "a bias that is added later would come behind the norm"
        if (lora := self._modules.get("lora")) is not None:  # adapters come before the norm
            output = lora(input_, output)
        return self.post_layernorm(output), None
