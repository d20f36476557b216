"""What of a rank's weights is published and exported: a stored tensor itself, or with its adapters ``W + scale B A``.

The sum is formed in float32 when it is asked for, for one tensor at a time: there is never a second copy of the model.
It is formed for a rank's whole tensor, so that every part of it has the same bits in whichever piece it is sent.
To engines that apply adapters themselves go the stored weights, and the adapters with their scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from torch import Tensor

StoredKey = tuple[int, str]  # model chunk, canonical name


@runtime_checkable
class Change(Protocol):
    """Adapters of one tensor, which the tensor has as its attribute ``adapter``."""

    def change(self) -> Tensor:
        """What they add to the tensor: float32, of its shape."""


class PublishedView(Protocol):
    """A rank's tensors, by model chunk and canonical name, as others get them."""

    def __getitem__(self, key: StoredKey) -> Tensor: ...

    def forget(self) -> None:
        """Frees what was made of them; call it when the weights may change."""


class PublishedTensors:
    """The tensors ``stored``, merged with their adapters."""

    def __init__(self, stored: Mapping[StoredKey, Tensor]) -> None:
        self._stored = stored
        self._last: tuple[StoredKey, Tensor] | None = None

    def __getitem__(self, key: StoredKey) -> Tensor:
        stored = self._stored[key]
        adapter = vars(stored).get("adapter")
        if not isinstance(adapter, Change):
            return stored.detach()
        if self._last is None or self._last[0] != key:
            self._last = None  # before the next is made
            self._last = key, adapter.change().add_(stored.detach())
        return self._last[1]

    def forget(self) -> None:
        """See ``PublishedView.forget``."""
        self._last = None


class StoredTensors:
    """The tensors ``stored`` as they are, without their adapters."""

    def __init__(self, stored: Mapping[StoredKey, Tensor]) -> None:
        self._stored = stored

    def __getitem__(self, key: StoredKey) -> Tensor:
        return self._stored[key].detach()

    def forget(self) -> None:
        """See ``PublishedView``: nothing is made."""


class ScaledAdapters:
    """The adapters ``stored``: every A as it is, and ``scale`` times every B, in float32."""

    def __init__(self, stored: Mapping[StoredKey, Tensor], scale: float) -> None:
        self._stored = stored
        self._scale = scale

    def __getitem__(self, key: StoredKey) -> Tensor:
        tensor = self._stored[key].detach()
        return tensor * self._scale if ".lora_B." in key[1] else tensor

    def forget(self) -> None:
        """See ``PublishedView``: nothing is kept."""
