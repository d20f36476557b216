"""Page-locked host memory in few large blocks, which take what was asked for; ``pinned_size.py`` has the rule."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from mcore_rl.parallel.pinned_size import aligned, with_setting


def keep_large_blocks_exact() -> None:
    """From now on torch rounds no large page-locked block of this process; without effect on a torch before 2.13."""
    if not hasattr(torch._C, "_accelerator_getAllocatorSettings"):  # 2.11
        return
    before = torch._C._accelerator_getAllocatorSettings()
    try:
        torch._C._accelerator_setAllocatorSettings(with_setting(before))
    except (RuntimeError, ValueError):  # it does not know the key, and may have forgotten the others meanwhile
        torch._C._accelerator_setAllocatorSettings(before)


def side_by_side(tensors: Sequence[Tensor], *, pinned: bool) -> list[Tensor]:
    """Empty host tensors of the shapes and dtypes of ``tensors`` (which may be on meta), contiguous, in one block.

    pinned: page-locked, for faster copies to and from an accelerator.  The block is freed with the last of them.
    """
    ends = list(accumulate((aligned(tensor.nbytes) for tensor in tensors), initial=0))
    block = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=pinned)
    return [
        block[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for begin, tensor in zip(ends[:-1], tensors, strict=True)
    ]
