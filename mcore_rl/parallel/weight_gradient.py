"""A weight's gradient, added to its float32 sum by the product that makes it: torch's product, under Apex's name.

Megatron's linears, with ``gradient_accumulation_fusion``, call a function of Apex's extension
``fused_weight_gradient_mlp_cuda`` (tensor_parallel/layers.py:569, 0.16.1; :680, 0.19.2).  Where that is not installed
this module takes its place: cuBLAS and hipBLAS add a bfloat16 product to a float32 matrix, and torch lets them since
2.10 (``_addmm_dtype_out_cuda``, aten/src/ATen/native/cuda/Blas.cpp).  Without it the product is rounded to bfloat16 and
written, and read once more to be added.

torch's CPU build has no product of two dtypes: there the factors are converted, which gives the same sums and is what
tests hold the other against.  Not here: sums of less than float32, which this package never makes.
"""

from __future__ import annotations

import sys
from functools import lru_cache

import torch
from torch import Tensor


def wgrad_gemm_accum_fp32(total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """``main_grad`` [O, I], float32, += ``grad_output`` [T, O] transposed times ``total_input`` [T, I]; Apex's name."""
    if total_input.dtype is main_grad.dtype:
        main_grad.addmm_(grad_output.t(), total_input)
    elif main_grad.device.type == "cpu":
        main_grad.addmm_(grad_output.t().float(), total_input.float())
    else:
        torch.addmm(main_grad, grad_output.t(), total_input, out_dtype=torch.float32, out=main_grad)


@lru_cache(maxsize=4)
def adds_up(device_type: str) -> bool:
    """Whether torch adds a bfloat16 product to a float32 matrix on the current device, unrounded; asked once."""
    if not torch.accelerator.is_available():
        return False
    ones = torch.ones(16, 16, device=device_type, dtype=torch.bfloat16)
    total = torch.full((16, 16), 2**-10, device=device_type)
    try:
        wgrad_gemm_accum_fp32(ones, ones, total)
    except RuntimeError:  # an older torch, or a build without it
        return False
    return bool((total == 16 + 2**-10).all())


def take_apexs_place() -> None:
    """Give Megatron this module for Apex's extension, unless it found that when it was imported."""
    from megatron.core.tensor_parallel import layers

    if not layers._grad_accum_fusion_available:
        layers.fused_weight_gradient_mlp_cuda = sys.modules[__name__]
        layers._grad_accum_fusion_available = True
