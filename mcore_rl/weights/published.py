"""What of a rank's weights is published and exported: a stored tensor itself, or with its adapters ``W + scale B A``.

The sum is formed in float32 when it is asked for, for one tensor at a time: there is never a second copy of the model.
It is formed for a rank's whole tensor, so that every part of it has the same bits in whichever piece it is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class Change(Protocol):
    """Adapters of one tensor, which the tensor has as its attribute ``adapter``."""

    def change(self) -> Tensor:
        """What they add to the tensor: float32, of its shape."""


class PublishedTensors:
    """The tensors ``stored``, by model chunk and canonical name, as others get them."""

    def __init__(self, stored: Mapping[tuple[int, str], Tensor]) -> None:
        self._stored = stored
        self._last: tuple[tuple[int, str], Tensor] | None = None

    def __getitem__(self, key: tuple[int, str]) -> Tensor:
        stored = self._stored[key]
        adapter = vars(stored).get("adapter")
        if not isinstance(adapter, Change):
            return stored.detach()
        if self._last is None or self._last[0] != key:
            self._last = None  # before the next is made
            self._last = key, adapter.change().add_(stored.detach())
        return self._last[1]

    def forget(self) -> None:
        """Frees the last sum; call it when the weights may change."""
        self._last = None
