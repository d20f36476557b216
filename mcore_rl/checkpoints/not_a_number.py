"""Names the tensors of a checkpoint that hold NaN: whatever is computed with them is NaN, often steps later."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

REMEDY = "Choose another checkpoint of the run that wrote it, or download it again"


class NanCheck:
    """Looks at tensors as they are read, piece by piece, and says which hold NaN.

    A maximum is NaN if any element is, so one pass over memory is enough.  On a CPU the pass takes one thread: torch's
    others would wait for the next piece by spinning, for longer than the pass itself takes, while the reader reads.
    Neither a piece nor anything else of a sound tensor is kept there.  An accelerator keeps one number for each tensor,
    and nothing waits for it before ``problems``.
    """

    def __init__(self) -> None:
        self._with_nan: dict[str, None] = {}  # an ordered set
        self._maxima: dict[str, Tensor] = {}

    def see(self, name: str, piece: Tensor) -> None:
        """Look at ``piece`` of tensor ``name``; of any shape and stride, of a dtype that has maxima."""
        if piece.numel() == 0:
            return
        piece = piece.detach()
        in_memory_order = piece.permute(sorted(range(piece.dim()), key=piece.stride, reverse=True))
        if piece.device.type == "cpu":
            with _one_thread():
                if math.isnan(in_memory_order.max().item()):
                    self._with_nan[name] = None
            return
        maximum = in_memory_order.max()
        before = self._maxima.get(name)
        self._maxima[name] = maximum if before is None else torch.maximum(before, maximum)

    def problems(self) -> list[str]:
        """One line for each tensor with NaN, in the order in which they were seen."""
        names = list(self._with_nan)
        if self._maxima:
            are_nan = torch.stack([maximum.float() for maximum in self._maxima.values()]).isnan().tolist()
            names += [name for name, is_nan in zip(self._maxima, are_nan, strict=True) if is_nan]
        return [f"tensor {name} holds NaN. {REMEDY}" for name in names]


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
