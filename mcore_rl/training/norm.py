"""RMSNorm of the local layer spec: computes what Hugging Face's models do, and carries Megatron's gradient marks.

Takes the place of ``WrappedTorchNorm``, which refuses sequence parallelism (megatron-core 0.16.1,
transformer/torch_norm.py:37).  LayerNorm and biases are deliberately not here.

Invariant: equal to transformers' ``LlamaRMSNorm`` (also Qwen2, Qwen3, Mixtral) bit for bit on the CPU, gradients too;
with ``config.layernorm_zero_centered_gamma``, to its ``Gemma2RMSNorm``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


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
        if self.zero_centered:
            normalised = F.rms_norm(x.float(), (self.hidden_size,), eps=self.eps)
            return (normalised * (1.0 + self.weight.float())).to(x.dtype)
        return self.weight * F.rms_norm(x, (self.hidden_size,), eps=self.eps)

    def extra_repr(self) -> str:
        """The text in ``print(model)``."""
        return f"{self.hidden_size}, eps={self.eps}" + (", zero-centred" if self.zero_centered else "")
