"""Names the tensors of a checkpoint that hold NaN: whatever is computed with them is NaN, often steps later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

REMEDY = "Choose another checkpoint of the run that wrote it, or download it again"


class NanCheck:
    """Collects the tensors that were read, in pieces, and says which hold NaN.  The pieces themselves are not kept.

    One pass over memory at its speed: a maximum is NaN if any element is.  On an accelerator nothing waits before
    ``problems``.
    """

    def __init__(self) -> None:
        self._maxima: dict[str, list[Tensor]] = {}

    def see(self, name: str, piece: Tensor) -> None:
        """Look at ``piece`` of tensor ``name``; of any shape and stride, of a dtype that has maxima."""
        if piece.numel():
            self._maxima.setdefault(name, []).append(piece.detach().max())

    def problems(self) -> list[str]:
        """One line for each tensor with NaN, in the order in which they were seen."""
        return [f"tensor {name} holds NaN. {REMEDY}" for name in _with_nan(self._maxima)]


def _with_nan(maxima: Mapping[str, Sequence[Tensor]]) -> list[str]:
    if not maxima:
        return []
    whole = torch.stack([torch.stack(list(each)).float().max() for each in maxima.values()])
    return [name for name, is_nan in zip(maxima, whole.isnan().tolist(), strict=True) if is_nan]
