"""RMSNorm over all query or key heads of a token, which tensor ranks hold in parts (OLMoE).

Megatron's own query and key norms see one head (megatron-core 0.16.1, transformer/attention.py:1283), so that no rank
has to ask another.  Here the mean square goes over every rank's heads: one float32 per token is summed over the tensor
group, in the forward pass and, for its gradient, in the backward pass.

Invariant: equal to transformers' ``OlmoeRMSNorm`` over the joined heads, bit for bit on one tensor rank, gradients too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor


class JointHeadNorm(torch.nn.Module):
    """``weight * x / sqrt(mean(x^2) + eps)`` with the mean over all heads; built as Megatron builds a head's norm.

    num_heads: query heads or key heads of the whole model, a multiple of the tensor ranks.  hidden_size: of one head.
    The weight [num_heads / tp * hidden_size] is that of this rank's heads and starts at 1.  A rank sees all tokens of
    its heads, also under sequence parallelism, so no gradient is left to sum.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, num_heads: int) -> None:
        super().__init__()
        self.tp_group = parallel_state.get_tensor_model_parallel_group()
        assert num_heads % self.tp_group.size() == 0, f"{num_heads} heads over {self.tp_group.size()} tensor ranks"
        self.eps = eps
        width = num_heads // self.tp_group.size() * hidden_size
        self.weight = torch.nn.Parameter(torch.ones(width, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., heads of this rank, hidden_size]; the result has its shape and dtype."""
        wide = x.flatten(-2).float()
        mean = wide.pow(2).mean(-1, keepdim=True) / self.tp_group.size()
        mean = _SumOverRanks.apply(mean, self.tp_group)  # type: ignore[no-untyped-call]
        normalised = (wide * torch.rsqrt(mean + self.eps)).to(x.dtype)
        return (self.weight * normalised).view(x.shape)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Megatron's description of the weight, whose heads are split over tensor ranks."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0}, sharded_offsets)


class _SumOverRanks(torch.autograd.Function):
    """The sum over the ranks of a group; every rank uses it, so its gradient is the sum over them too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _summed(grad, ctx.group), None


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    if group.size() == 1:
        return x
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x
