"""A region of a tensor as a view of it."""

from __future__ import annotations

from torch import Tensor

from mcore_rl.weights.tensor_slice import TensorSlice


def view_of(tensor: Tensor, region: TensorSlice) -> Tensor:
    """The elements of ``tensor`` that lie in ``region``, as a view."""
    for dim, (begin, size) in enumerate(zip(*region, strict=True)):
        tensor = tensor.narrow(dim, begin, size)
    return tensor
