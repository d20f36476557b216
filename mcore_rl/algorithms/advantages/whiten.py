"""Whitening over the global batch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mcore_rl.algorithms.ragged import CHUNK, Trained, spread

EPSILON = 1e-8  # added to the variance, as in verl


def whiten(x_T: Tensor, mask_T: Tensor) -> Tensor:
    """``(x - mean) / sqrt(variance + 1e-8)`` over the tokens of ``mask_T``, 0 elsewhere; [T].

    The variance is the unbiased one (Bessel's correction), as in verl; OpenAI's baselines divide by the count.  One
    token has no variance and becomes 0, as do equal values; of no token nothing is left.  Sums are in float64.
    """
    trained = Trained(mask_T)
    if not trained.count:
        return torch.zeros_like(x_T)
    x_M = trained.gather(x_T)
    found = spread(torch.split(x_M, CHUNK))
    scale = math.sqrt(found.variance * trained.count / max(trained.count - 1, 1) + EPSILON)
    return trained.scatter(x_M.sub_(found.mean).div_(scale))
