"""Whitening over the global batch."""

from __future__ import annotations

import torch
from torch import Tensor

EPSILON = 1e-8  # added to the variance, as in verl


def whiten(x_T: Tensor, mask_T: Tensor) -> Tensor:
    """``(x - mean) / sqrt(variance + 1e-8)`` over the tokens of ``mask_T``, 0 elsewhere; [T].

    The variance is the unbiased one (Bessel's correction), as in verl; OpenAI's baselines divide by the count.  One
    token has no variance and becomes 0, as do equal values; of no token nothing is left.  Sums are in float64.
    """
    count = int(mask_T.sum())
    untrained_T = ~mask_T
    mean = x_T.masked_fill(untrained_T, 0).sum(dtype=torch.float64) / max(count, 1)
    centred_T = (x_T - mean.to(x_T.dtype)).masked_fill_(untrained_T, 0)
    variance = centred_T.square().sum(dtype=torch.float64) / max(count - 1, 1)
    return centred_T * (variance + EPSILON).rsqrt().to(x_T.dtype)
