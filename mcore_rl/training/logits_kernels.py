"""The two passes of ``logprobs`` over logits as Triton kernels, for accelerators.

One by one, the operations of ``logprobs`` move each logit some fifteen times, and are launched for a few tokens at a
time; on a CPU these stay in the cache.  Here forward reads each logit once, backward reads and writes it once, and
nothing but [T]-vectors is allocated.  The softmax is summed online (arXiv:1805.02867), the sum of z exp(z) beside it.

torch's builds for CUDA and ROCm bring Triton; nothing here is imported without it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 8_192  # of a row at a time; with 8 warps the fastest of 15 pairs on an H200
WARPS = 8
UNDERFLOW = tl.constexpr(-128.0)  # see ``logprobs``
FLOAT_MAX = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit  # type: ignore[untyped-decorator]
def _capped(x, soft_cap):  # type: ignore[no-untyped-def]
    """``soft_cap * tanh(x / soft_cap)``; Triton has no tanh that its interpreter knows."""
    magnitude = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(x) / soft_cap) + 1.0)
    return soft_cap * tl.where(x < 0, -magnitude, magnitude)


@triton.jit  # type: ignore[untyped-decorator]
def _sum_kernel(  # type: ignore[no-untyped-def]
    logits,
    stride,
    maxima,
    sums,
    weighted,
    inverse_temperature,
    soft_cap,
    num_columns: tl.constexpr,
    HAS_CAP: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A row for each program."""
    row = tl.program_id(0).to(tl.int64)
    maximum = -FLOAT_MAX
    total = 0.0
    mean = 0.0
    for first in range(0, num_columns, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        inside = columns < num_columns
        x = tl.load(logits + row * stride + columns, mask=inside, other=-float("inf")).to(tl.float32)
        if HAS_CAP:
            x = tl.where(inside, _capped(x, soft_cap), -float("inf"))
        z = x * inverse_temperature
        highest = tl.maximum(maximum, tl.max(z, 0))
        moved = tl.maximum(maximum - highest, UNDERFLOW)
        scale = tl.exp(moved)
        z = z - highest
        if WITH_ENTROPY:
            z = tl.maximum(z, UNDERFLOW, propagate_nan=tl.PropagateNan.ALL)
            mean = (mean + moved * total) * scale + tl.sum(tl.where(inside, z * tl.exp(z), 0.0), 0)
        total = total * scale + tl.sum(tl.where(inside, tl.exp(z), 0.0), 0)
        maximum = highest
    tl.store(maxima + row, maximum)
    tl.store(sums + row, total)
    tl.store(weighted + row, mean)


@triton.jit  # type: ignore[untyped-decorator]
def _gradient_kernel(  # type: ignore[no-untyped-def]
    logits,
    stride,
    maxima,
    offsets,
    slopes,
    inverse_temperature,
    soft_cap,
    num_columns: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SLOPE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """``COLUMNS`` of a row for each program; a row without a gradient is not read."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < num_columns
    at = logits + row * stride + columns
    offset = tl.load(offsets + row)
    is_trained = offset != 0.0
    if HAS_SLOPE:
        slope = tl.load(slopes + row)
        is_trained = is_trained | (slope != 0.0)
    x = tl.load(at, mask=columns < tl.where(is_trained, num_columns, 0), other=0.0).to(tl.float32)
    capped = _capped(x, soft_cap) if HAS_CAP else x
    z = capped * inverse_temperature - tl.load(maxima + row)
    if HAS_SLOPE:
        z = tl.maximum(z, UNDERFLOW, propagate_nan=tl.PropagateNan.ALL)
        gradient = tl.exp(z) * (offset + slope * z)
    else:
        gradient = tl.exp(z) * offset
    if HAS_CAP:
        ratio = capped / soft_cap
        gradient = gradient * (1.0 - ratio * ratio)
    gradient = tl.where(is_trained, gradient, 0.0)
    tl.store(at, gradient.to(logits.dtype.element_ty), mask=inside)


def local_sums(
    logits_TV: Tensor, inverse_temperature: float, soft_cap: float | None, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``logprobs._local_sums``; the columns lie one beside the other."""
    num_tokens, num_columns = logits_TV.shape
    maxima_T1, sums_T1, weighted_T1 = logits_TV.new_empty((3, num_tokens, 1), dtype=torch.float32)
    if num_tokens:
        _sum_kernel[(num_tokens,)](
            logits_TV,
            logits_TV.stride(0),
            maxima_T1,
            sums_T1,
            weighted_T1,
            inverse_temperature,
            soft_cap or 1.0,
            num_columns,
            HAS_CAP=soft_cap is not None,
            WITH_ENTROPY=with_entropy,
            COLUMNS=COLUMNS,
            num_warps=WARPS,
        )
    return maxima_T1, sums_T1, weighted_T1


def overwrite_with_gradient(
    logits_TV: Tensor,
    max_T1: Tensor,
    offset_T1: Tensor,
    slope_T1: Tensor | None,
    inverse_temperature: float,
    soft_cap: float | None,
) -> None:
    """As ``logprobs._overwrite_with_gradient``; a row whose offset and slope are zero is zero, whatever it was."""
    num_tokens, num_columns = logits_TV.shape
    if num_tokens == 0 or num_columns == 0:
        return
    vectors = (x_T1.contiguous() for x_T1 in (max_T1, offset_T1, offset_T1 if slope_T1 is None else slope_T1))
    _gradient_kernel[(num_tokens, triton.cdiv(num_columns, COLUMNS))](
        logits_TV,
        logits_TV.stride(0),
        *vectors,
        inverse_temperature,
        soft_cap or 1.0,
        num_columns,
        HAS_CAP=soft_cap is not None,
        HAS_SLOPE=slope_T1 is not None,
        COLUMNS=COLUMNS,
        num_warps=WARPS,
    )
