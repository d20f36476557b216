"""Page-locked host memory in few large blocks, which take what was asked for; ``pinned_size.py`` has the rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from mcore_rl.parallel.pinned_size import aligned, with_setting

# torch 2.11 and 2.13 take the first of these that is set (c10/cuda/CUDAAllocatorConfig.h); vLLM 0.32 asks for the last
# one first (device_allocator/alloc_conf.py).
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def knows_setting() -> bool:
    """Whether this torch's allocators know ``pinned_size.KEY``: one that does not raises at its first allocation.

    torch 2.13 knows it, 2.11 does not.
    """
    if not hasattr(torch._C, "_accelerator_getAllocatorSettings"):  # 2.11
        return False
    before = torch._C._accelerator_getAllocatorSettings()
    try:
        torch._C._accelerator_setAllocatorSettings(with_setting(before))
    except (RuntimeError, ValueError):
        return False
    finally:
        torch._C._accelerator_setAllocatorSettings(before)
    return True


def keep_large_blocks_exact() -> None:
    """From now on torch rounds no large page-locked block of this process, if it knows the setting."""
    if knows_setting():
        before = torch._C._accelerator_getAllocatorSettings()
        torch._C._accelerator_setAllocatorSettings(with_setting(before))


def settings_of_a_new_process(max_cached_bytes: int, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables by which torch rounds no page-locked block above ``max_cached_bytes`` in a process to be started.

    environ: what it inherits; the settings that torch would take from it stay.  All variables are set alike, so that
    torch and vLLM read the same.  Empty if this torch does not know the setting.
    """
    if not knows_setting():
        return {}
    return dict.fromkeys(ALLOCATOR_VARIABLES, with_setting(inherited_settings(environ), max_cached_bytes))


def inherited_settings(environ: Mapping[str, str]) -> str:
    """The settings of torch's allocators that a process takes from ``environ``."""
    return next((environ[name] for name in ALLOCATOR_VARIABLES if name in environ), "")


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
