"""Unpacks what vLLM packs for kernels of the CPU: the weights of fused experts, and of causal convolutions.

``CPUUnquantizedExperts.process_weights_after_loading`` (layers/fused_moe/experts/cpu_moe.py, 0.32) pads the
intermediate size with zeros and moves every element to another place, by ``cpu_prepack_moe_weight``.  We find the
places by packing the digits of each element's index, in base 256, which bfloat16 holds exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import torch
from torch import Tensor
from vllm._custom_ops import causal_conv1d_weight_pack, cpu_prepack_moe_weight
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

DIGIT = 256
PACKED = ("w13_weight", "w2_weight")
CONVOLUTION = "convolution"


def unpacked_experts(packed: Tensor, experts: CPUUnquantizedExperts, attribute: str, shape: Sequence[int]) -> Tensor:
    """The unpacked weight of one expert, of ``shape``, from the ``packed`` weight.

    attribute: ``w13_weight`` (gate and up one after the other) or ``w2_weight``.
    """
    if experts._use_zentorch:
        return packed  # not packed
    size = experts.moe_config.intermediate_size_per_partition
    padded = experts._padded_intermediate_size(experts.moe_config)
    wide = (2 * padded, shape[1]) if attribute == "w13_weight" else (shape[0], padded)
    plain = torch.empty(prod(wide), dtype=packed.dtype, device=packed.device)
    plain[_origins(wide, packed.dtype, experts.isa)] = packed.reshape(-1)
    whole = plain.view(wide)
    if padded == size:
        return whole
    if attribute == "w13_weight":
        return torch.cat([whole[:size], whole[padded : padded + size]])
    return whole[:, :size]


def unpacked_convolution(packed: Tensor, shape: Sequence[int]) -> Tensor:
    """The unpacked weight of a convolution, of ``shape`` [channels, 1, taps], from the ``packed`` one.

    ``dispatch_cpu_unquantized_gemm`` (layers/utils.py, 0.32) packs it where it has four taps and is bfloat16.
    """
    plain = torch.empty(packed.numel(), dtype=packed.dtype, device=packed.device)
    plain[_origins((shape[0], shape[2]), packed.dtype, CONVOLUTION)] = packed.reshape(-1)
    return plain.view(*shape)


@lru_cache(maxsize=8)
def _origins(shape: tuple[int, int], dtype: torch.dtype, isa: str) -> Tensor:
    """For each element of a packed matrix, its row-major index in the unpacked one: int64 [elements].

    isa: how experts are packed; or ``CONVOLUTION``.
    """
    index = torch.arange(prod(shape))
    origins = torch.zeros_like(index)
    unit = 1
    while unit < prod(shape):
        digits = (index // unit % DIGIT).to(dtype).view(shape)
        packed = causal_conv1d_weight_pack(digits) if isa == CONVOLUTION else cpu_prepack_moe_weight(digits[None], isa)
        origins += packed.reshape(-1).long() * unit
        unit *= DIGIT
    return origins
