"""A plugin of vLLM that computes quantised layers on a CPU, slowly: weights and activations in fp8, sums in float32.

vLLM's own kernels of a CPU need AMX tiles, and it has none of experts.  What it quantises, and when, stays its code:
the products are replaced, and the operators of accelerators that it quantises with, in their arithmetic.
``put_on_path`` lets processes find it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

PLUGIN = Path(__file__).parent / "fp8_plugin"
FP8 = torch.float8_e4m3fn


def put_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets this process find the plugin, which looks for it before it starts anything, and all that it starts."""
    monkeypatch.syspath_prepend(str(PLUGIN))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PLUGIN), os.environ.get("PYTHONPATH", "")]))


def install() -> None:
    """Replaces what a CPU lacks; vLLM calls it in each of its processes."""
    import vllm.model_executor.kernels.linear as kernels
    from vllm import _custom_ops
    from vllm.model_executor.layers.fused_moe.oracle import fp8 as oracle
    from vllm.model_executor.layers.quantization.online import fp8, mxfp8
    from vllm.platforms import PlatformEnum

    blocks, scaled, micro = _kernels()
    kernels._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU] = [blocks]
    kernels._POSSIBLE_FP8_KERNELS[PlatformEnum.CPU] = [scaled]
    kernels._POSSIBLE_MXFP8_KERNELS[PlatformEnum.CPU] = [micro]
    _custom_ops.scaled_fp8_quant = _scaled_fp8_quant
    fp8.select_fp8_moe_backend = lambda **_: (oracle.Fp8MoeBackend.TRITON, Experts)
    mxfp8.select_mxfp8_moe_backend = lambda **_: (oracle.Fp8MoeBackend.TRITON_MXFP8, Experts)
    oracle.make_fp8_moe_kernel = lambda moe_quant_config, **_: Experts(moe_quant_config)


def _scaled_fp8_quant(
    values: Tensor, scale: Tensor | None = None, *, use_per_token_if_dynamic: bool = False, **_: Any
) -> tuple[Tensor, Tensor]:
    """The accelerators' operator: a given scale is inverted first, one of its own is divided by."""
    if scale is None:
        assert use_per_token_if_dynamic
        scale = (values.abs().amax(-1, keepdim=True).float() / torch.tensor(448.0)).clamp_min(1 / (448.0 * 512))
        return (values.float() / scale).clamp(-448, 448).to(FP8), scale
    scaled = values.float() * (1.0 / scale)
    return torch.where(scaled < 448, scaled, 448).clamp_min(-448).to(FP8), scale


def _kernels() -> tuple[type, type, type]:
    from vllm.model_executor.kernels.linear.mxfp8.Mxfp8LinearKernel import Mxfp8LinearKernel
    from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
    from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearKernel

    class Supported:
        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, None]:
            return True, None

        @classmethod
        def can_implement(cls, config: Any) -> tuple[bool, None]:
            return True, None

        def process_weights_after_loading(self, layer: Any) -> None:
            """Nothing is packed."""

    class Blocks(Supported, Fp8BlockScaledMMLinearKernel):  # type: ignore[misc]
        def apply_block_scaled_mm(self, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:
            return dequantised(A, As) @ dequantised(B, Bs).t()

    class Scaled(Supported, FP8ScaledMMLinearKernel):  # type: ignore[misc]
        def apply_scaled_mm(
            self,
            *,
            A: Tensor,
            B: Tensor,
            out_dtype: Any,
            As: Tensor,
            Bs: Tensor,
            bias: Any,
            output_shape: Any,
        ) -> Tensor:
            product = (A.float() * As) @ (B.float() * Bs.reshape(1, -1))
            return (product if bias is None else product + bias).to(out_dtype).view(*output_shape)

    class Micro(Supported, Mxfp8LinearKernel):  # type: ignore[misc]
        def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
            product = rounded(x, 32) @ dequantised(layer.weight, layer.weight_scale).t()
            return (product if bias is None else product + bias).to(x.dtype)

    return Blocks, Scaled, Micro


def dequantised(held: Tensor, scales: Tensor) -> Tensor:
    """The numbers that a matrix in fp8 stands for, float32."""
    factors = torch.exp2(scales.float() - 127) if scales.dtype is torch.uint8 else scales
    if factors.numel() == 1:
        return held.float() * factors
    for dim, size in enumerate(held.shape):
        each = {1: size, size: 1}.get(factors.shape[dim]) or (32 if scales.dtype is torch.uint8 else 128)
        factors = factors.repeat_interleave(each, dim).narrow(dim, 0, size)
    return held.float() * factors


def rounded(x: Tensor, group: int | None) -> Tensor:
    """Activations as they are after fp8, float32: a scale for ``group`` columns, None: for a token."""
    groups = x.float().unflatten(-1, (-1, group or x.shape[-1]))
    scale = (groups.abs().amax(-1, keepdim=True) / 448).clamp_min(1e-10)
    if group == 32:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    return ((groups / scale).to(FP8).float() * scale).flatten(-2)


class _NotMonolithic:
    """``FusedMoEMethodBase`` asks a kernel for a value, and a class of experts by a call."""

    def __get__(self, kernel: Any, _: type) -> Any:
        return (lambda: False) if kernel is None else False


class Experts:
    """The kernel of a layer's experts: one expert after another."""

    can_overlap_shared_experts = False
    consumes_expert_mask = False

    def __init__(self, config: Any) -> None:
        self.w1_scale, self.w2_scale, self.block = config.w1_scale, config.w2_scale, config.block_shape
        self.prepare_finalize = self
        self.fused_experts = self

    is_monolithic = _NotMonolithic()

    @staticmethod
    def topk_indices_dtype() -> None:
        return None

    @staticmethod
    def output_is_reduced() -> bool:
        return False

    def apply(self, x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, **_: Any) -> Tensor:
        group = None if self.block is None else self.block[1]
        result = torch.zeros(x.shape, dtype=torch.float32)
        for expert in ids.unique().tolist():
            tokens, choices = (ids == expert).nonzero(as_tuple=True)
            gate, up = (rounded(x[tokens], group) @ dequantised(w13[expert], self.w1_scale[expert]).t()).chunk(2, -1)
            inner = torch.nn.functional.silu(gate) * up
            made = rounded(inner.to(x.dtype), group) @ dequantised(w2[expert], self.w2_scale[expert]).t()
            result.index_add_(0, tokens, made * weights[tokens, choices].float().unsqueeze(-1))
        return result.to(x.dtype)
