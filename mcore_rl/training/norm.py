"""RMSNorms of the local layer spec: compute what Hugging Face's models do, and carry Megatron's gradient marks.

Takes the place of ``WrappedTorchNorm``, which refuses sequence parallelism (megatron-core 0.16.1,
transformer/torch_norm.py:37).  LayerNorm and biases are deliberately not here.

Invariant: ``RMSNorm`` is equal to transformers' ``LlamaRMSNorm`` (also Qwen2, Qwen3, Mixtral) bit for bit on the CPU,
gradients too; with ``config.layernorm_zero_centered_gamma``, to its ``Gemma2RMSNorm``.

On accelerators quotient and product are one kernel, and so are they in backward, which keeps the input alone: PyTorch
has a kernel for the quotient, another for the product, and keeps both their inputs.  The roundings are the same, the
order in which a kernel sums is not.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from mcore_rl.parallel.groups import sum_over
from mcore_rl.training.one_kernel import OneKernel, compiles


class RMSNorm(torch.nn.Module):
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last dimension (arXiv:1910.07467), built as Megatron builds one.

    The quotient is computed in float32 and cast back to the dtype of ``x`` *before* it is multiplied by ``weight``;
    ``F.rms_norm`` with the weight inside would multiply first, which differs in bf16 (by 3e-3 relative).

    Zero-centred (``config.layernorm_zero_centered_gamma``): ``(1 + weight) * x / sqrt(mean(x^2) + eps)``, all of it in
    float32 and cast at the end; the weight starts at zeros.

    hidden_size: elements of the last dimension; for query and key norms, of one head.  The weight [hidden_size] has
    dtype ``config.params_dtype`` and is made on the default device, as in Megatron's own PyTorch norm.
    zero_centered: None: as ``config`` says.

    Tensor-parallel ranks each hold the whole weight and see a part of the tokens (sequence parallelism) or of the heads
    (query and key norms), so gradients must be summed over them.  Megatron's finalize_model_grads does so
    (``_allreduce_non_tensor_model_parallel_grads``) for parameters marked ``sequence_parallel`` and, where
    ``config.qk_layernorm`` is set, for those with ``q_layernorm`` or ``k_layernorm`` in their name.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float, zero_centered: bool | None = None
    ) -> None:
        super().__init__()
        assert config.normalization == "RMSNorm", f"normalization is {config.normalization}, not RMSNorm"
        self.hidden_size = hidden_size
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma if zero_centered is None else zero_centered
        start = 0.0 if self.zero_centered else 1.0
        self.weight = torch.nn.Parameter(torch.full((hidden_size,), start, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., hidden_size]; the result has its shape and dtype."""
        if compiles(x) and x.numel():
            out: Tensor = _Norm.apply(x, self.weight, self.eps, self.zero_centered)  # type: ignore[no-untyped-call]
            return out
        if self.zero_centered:
            normalised = F.rms_norm(x.float(), (self.hidden_size,), eps=self.eps)
            return (normalised * (1.0 + self.weight.float())).to(x.dtype)
        return self.weight * F.rms_norm(x, (self.hidden_size,), eps=self.eps)

    def extra_repr(self) -> str:
        """The text in ``print(model)``."""
        return f"{self.hidden_size}, eps={self.eps}" + (", zero-centred" if self.zero_centered else "")


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
        ctx.eps = eps
        ctx.zero_centered = zero_centered
        ctx.save_for_backward(x, weight)
        out: Tensor = normed(x.reshape(-1, x.shape[-1]), weight, eps, zero_centered)
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        rows_TH = x.reshape(-1, x.shape[-1])
        grads_TH = grad.reshape(-1, x.shape[-1])
        is_trained = ctx.needs_input_grad[1]
        of_rows_TH, of_weight = normed_back(grads_TH, rows_TH, weight, ctx.eps, ctx.zero_centered, is_trained)
        return of_rows_TH.view(x.shape), of_weight, None, None


@OneKernel
def normed(rows_TH: Tensor, weight_H: Tensor, eps: float, zero_centered: bool) -> Tensor:
    """The norm's forward pass."""
    quotients_TH, _ = _quotients(rows_TH, eps)
    if zero_centered:
        return (quotients_TH * (1.0 + weight_H.float())).to(rows_TH.dtype)
    return weight_H * quotients_TH.to(rows_TH.dtype)


@OneKernel
def normed_back(
    grads_TH: Tensor, rows_TH: Tensor, weight_H: Tensor, eps: float, zero_centered: bool, is_trained: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradients of rows and weight.  is_trained: the weight has one."""
    quotients_TH, scales_T1 = _quotients(rows_TH, eps)
    factors_TH = (grads_TH * weight_H).float()
    rounded_TH = quotients_TH.to(rows_TH.dtype)
    if zero_centered:
        factors_TH = grads_TH.float() * (1.0 + weight_H.float())
        rounded_TH = quotients_TH
    of_weight_H = (grads_TH * rounded_TH).sum(0).to(weight_H.dtype) if is_trained else None
    shares_T1 = (factors_TH * quotients_TH).mean(-1, keepdim=True)
    return ((factors_TH - quotients_TH * shares_T1) * scales_T1).to(rows_TH.dtype), of_weight_H


def _quotients(rows_TH: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rows over their root mean squares, one over these), float32."""
    wide_TH = rows_TH.float()
    scales_T1 = torch.rsqrt(wide_TH.square().mean(-1, keepdim=True) + eps)
    return wide_TH * scales_T1, scales_T1


class JointHeadNorm(torch.nn.Module):
    """``weight * x / sqrt(mean(x^2) + eps)`` with the mean over all query or key heads of a token (OLMoE).

    Megatron's own query and key norms see one head (megatron-core 0.16.1, transformer/attention.py:1283), so that no
    rank has to ask another.  Here one float32 per token is summed over the tensor ranks, forward and backward.
    Invariant: equal to transformers' ``OlmoeRMSNorm`` over the joined heads, bit for bit on one tensor rank, gradients
    too.

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
        normalised = (wide * torch.rsqrt(sum_over(mean, self.tp_group) + self.eps)).to(x.dtype)
        return (self.weight * normalised).view(x.shape)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Megatron's description of the weight, whose heads are split over tensor ranks."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0}, sharded_offsets)
