"""A checksum of a tensor that is the sum of its parts' checksums: many ranks' shards can be compared with one tensor.

    fingerprint = sum over elements of bits(x) * w_0(i_0) * w_1(i_1) * ...   modulo 2**64

``bits`` is the element's bit pattern as a signed integer (-0.0 counts as 0.0), or the element if it is an integer; i_d
is its index along dimension d, and w_d an odd pseudo-random number for each index.  A changed element always shows,
because odd factors lose no bit; swapped elements, rows or shards show unless random 64-bit numbers collide.  Zeros add
nothing, so zero padding may be left out.  Not cryptographic.  About 0.4 GB/s on one core.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from mcore_rl.weights.tensor_slice import TensorSlice, row_major_strides, windows
from mcore_rl.weights.views import view_of

WINDOW_ELEMENTS = 1 << 18  # as int64, 2 MiB: stays in a core's cache
# The odd constants of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(values: Tensor, start: Sequence[int]) -> int:
    """The summand of ``values``, the region of a tensor that begins at ``start``, in its fingerprint; signed 64 bits.

    A whole tensor: ``fingerprint(tensor, (0,) * tensor.dim())``.  Equal values of different dtypes differ.
    """
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for region in windows(TensorSlice.whole(values.shape), row_major_strides(values.shape), WINDOW_ELEMENTS):
        part = _bits(view_of(values, region))
        for dim in reversed(range(values.dim())):
            part = (part * _factors(dim, start[dim] + region.start[dim], region.shape[dim], values.device)).sum(-1)
        total += part
    return int(total.item())


def added(*parts: int) -> int:
    """The fingerprint of a tensor from those of its parts: their sum, wrapped to signed 64 bits."""
    return (sum(parts) + (1 << 63)) % (1 << 64) - (1 << 63)


def _bits(values: Tensor) -> Tensor:
    if not values.dtype.is_floating_point:
        return values.long()
    return (values + 0.0).contiguous().view(_BITS[values.dtype.itemsize]).long()


@lru_cache(maxsize=64)
def _factors(dim: int, begin: int, size: int, device: torch.device) -> Tensor:
    """w_dim of ``begin`` to ``begin + size``: mixed in wrapping int64 arithmetic, odd."""
    mixed = (torch.arange(begin, begin + size, device=device) * 8 + dim + 1) * _FIRST
    mixed = (mixed ^ (mixed >> 29)) * _SECOND
    return (mixed ^ (mixed >> 32)) | 1
