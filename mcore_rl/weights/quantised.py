"""Quantises matrices as vLLM's online quantisation does, bit for bit: what an engine's weights are compared with.

A matrix is cut into blocks of one scale each.  ``widen`` finds the greatest magnitude of each block, from any parts of
the matrix; ``scales`` follow from these; ``quantise`` turns any part into fp8.  So ranks that have a part each can
quantise together: they need nothing of one another but the magnitudes.

Read in vLLM 0.32: ``per_block_cast_to_fp8`` (utils/deep_gemm.py), and below layers/quantization ``_fp8_scale`` and
``_fp8_quant_per_channel`` (online/fp8.py), ``QuantFP8.forward_native`` (input_quant_fp8.py) and
``_mxfp8_e4m3_quantize_torch`` (utils/mxfp8_utils.py).  They differ in small things that decide bits: blocks multiply
with the rounded inverse of a scale, channels divide by the scale.

Does not pack: what a kernel does to the bytes afterwards is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_rl.config.rollout import Quantization
from mcore_rl.weights.quantised_shards import BLOCK, block_shape, num_scales

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
LEAST_OF_BLOCK = 1e-4  # the least magnitude of a block: its scale is never 0
LEAST_OF_ACTIVATIONS = 1 / (FP8_MAX * 512)  # the least scale of inputs
SCALES = " (scales)"  # follows a tensor's name in the name of its scales
STORED_BY_COLUMNS = (Quantization.fp8_channel, Quantization.fp8_tensor)  # vLLM's linear layers have the transpose


@dataclass(frozen=True)
class QuantisedMatrix:
    """A matrix of ``shape`` that is quantised as ``quantization`` says."""

    quantization: Quantization
    shape: tuple[int, int]

    def magnitudes(self, device: torch.device | str = "cpu") -> Tensor:
        """The magnitudes of a matrix without elements, for ``widen``: float32 [scales of rows, of columns]."""
        return torch.zeros(num_scales(self.quantization, self.shape), device=device)

    def widen(self, magnitudes: Tensor, values: Tensor, start: Sequence[int]) -> None:
        """Raises ``magnitudes`` to those of ``values``, the region of the matrix that begins at ``start``."""
        greatest = values.abs().float()
        first = []
        for dim, size in enumerate(block_shape(self.quantization, self.shape)):
            greatest = _greatest(greatest, dim, start[dim], size, whole=size == self.shape[dim])
            first.append(start[dim] // size)
        place = magnitudes[first[0] : first[0] + greatest.shape[0], first[1] : first[1] + greatest.shape[1]]
        torch.maximum(place, greatest, out=place)

    def scales(self, magnitudes: Tensor) -> Tensor:
        """The scales of blocks of these magnitudes: float32, or uint8 exponents of mxfp8, of the same shape."""
        top = torch.tensor(FP8_MAX, device=magnitudes.device)  # divided by truly, and not times its inverse
        match self.quantization:
            case Quantization.fp8_block:
                return magnitudes.clamp(LEAST_OF_BLOCK) / FP8_MAX
            case Quantization.fp8_channel:
                return (magnitudes / top).clamp_min(1.0 / (top * 512))
            case Quantization.fp8_tensor:
                return magnitudes / top
            case _:
                least = torch.finfo(torch.float32).tiny
                exponent = torch.ceil(torch.log2(magnitudes.clamp(min=least) / FP8_MAX)) + 127.0
                return exponent.clamp(0, 254).to(torch.uint8)

    def quantise(self, values: Tensor, start: Sequence[int], scales: Tensor) -> Tensor:
        """Float8 of ``values``, the region of the matrix that begins at ``start``, by the ``scales`` of the matrix."""
        each = self._of_elements(scales, start, values.shape)
        match self.quantization:
            case Quantization.fp8_block:
                return (values * (1.0 / each)).to(FP8)
            case Quantization.fp8_channel:
                return (values / each).clamp_(-FP8_MAX, FP8_MAX).to(FP8)
            case Quantization.fp8_tensor:
                # Zeros of a matrix of zeros are 0 / 0; the kernel's comparisons make that the greatest number.
                scaled = (values.float() * each.reciprocal()).nan_to_num_(nan=FP8_MAX)
                return scaled.clamp_(-FP8_MAX, FP8_MAX).to(FP8)
            case _:
                return (values.float() / torch.exp2(each.float() - 127.0)).to(FP8)

    def dequantise(self, held: Tensor, scales: Tensor) -> Tensor:
        """The numbers that the whole matrix ``held``, float8, stands for: float32."""
        each = self._of_elements(scales, (0, 0), held.shape)
        return held.float() * (torch.exp2(each.float() - 127.0) if scales.dtype is torch.uint8 else each)

    def _of_elements(self, scales: Tensor, start: Sequence[int], shape: Sequence[int]) -> Tensor:
        """The scale of each element of a region."""
        for dim, size in enumerate(block_shape(self.quantization, self.shape)):
            at = torch.arange(start[dim], start[dim] + shape[dim], device=scales.device) // size
            scales = scales.index_select(dim, at)
        return scales


def quantise(values: Tensor, quantization: Quantization) -> tuple[Tensor, Tensor]:
    """(float8, scales) of a whole matrix [rows, columns]."""
    matrix = QuantisedMatrix(quantization, (values.shape[0], values.shape[1]))
    magnitudes = matrix.magnitudes(values.device)
    matrix.widen(magnitudes, values, (0, 0))
    scales = matrix.scales(magnitudes)
    return matrix.quantise(values, (0, 0), scales), scales


def rounded(values: Tensor, quantization: Quantization) -> Tensor:
    """A whole matrix as quantised engines multiply with it: quantised and dequantised, float32."""
    held, scales = quantise(values, quantization)
    return QuantisedMatrix(quantization, (values.shape[0], values.shape[1])).dequantise(held, scales)


def rounded_activations(x: Tensor, quantization: Quantization) -> Tensor:
    """Inputs of a product as kernels of ``quantization`` round them, in the dtype of ``x`` [..., columns].

    A scale is of 128 columns of a token (fp8_block), of 32 (mxfp8), or of a token.  Read in vLLM 0.32's
    ``QuantFP8.forward_native``.  fp8_tensor has a scale for a token too, where CUTLASS multiplies: from Ada on.
    """
    flat = x.reshape(-1, x.shape[-1]).float()
    match quantization:
        case Quantization.fp8_block:
            padded = torch.nn.functional.pad(flat, (0, -flat.shape[1] % BLOCK)).view(len(flat), -1, BLOCK)
            scales = (padded.abs().amax(-1, keepdim=True) / FP8_MAX).clamp(min=LEAST_OF_ACTIVATIONS)
            back = (padded / scales).clamp(-FP8_MAX, FP8_MAX).to(FP8).float() * scales
            back = back.flatten(1)[:, : flat.shape[1]]
        case Quantization.mxfp8:
            back = rounded(flat, quantization)
        case _:
            scales = (flat.abs().amax(-1, keepdim=True) / FP8_MAX).clamp(min=LEAST_OF_ACTIVATIONS)
            back = (flat * scales.reciprocal()).clamp(-FP8_MAX, FP8_MAX).to(FP8).float() * scales
    return back.reshape(x.shape).to(x.dtype)


def _greatest(values: Tensor, dim: int, begin: int, size: int, *, whole: bool) -> Tensor:
    """The greatest of each block of ``size`` along ``dim``; the first of ``values`` is element ``begin``."""
    if whole:
        return values.amax(dim, keepdim=True)
    if size == 1:
        return values
    before = begin % size
    after = -(before + values.shape[dim]) % size
    padding = (before, after) if dim == 1 else (0, 0, before, after)
    padded = torch.nn.functional.pad(values, padding)
    return padded.view(*padded.shape[:dim], -1, size, *padded.shape[dim + 1 :]).amax(dim + 1)
