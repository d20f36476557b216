"""Named copies of the model's weights in host memory, swapped in for a pass and out again.

The reference policy is such a snapshot of the actor, not a second model.  A snapshot holds only the weights that the
forward pass reads; a swap leaves the optimizer's main weights, moments and gradients alone, so no step may run in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from mcore_rl.parallel.device import Platform, pinned_empty_like, synchronize


class Snapshots:
    """The snapshots of one engine's model chunks on this rank."""

    def __init__(self, chunks: Sequence[torch.nn.Module], platform: Platform) -> None:
        self._live = [tensor for chunk in chunks for tensor in (*chunk.parameters(), *chunk.buffers())]
        self._platform = platform
        self._kept: dict[str, list[Tensor]] = {}
        self._swapped_in: str | None = None

    @property
    def swapped_in(self) -> str | None:
        """Name of the snapshot that now stands in for the live weights; None if none does."""
        return self._swapped_in

    def names(self) -> list[str]:
        """Names of the snapshots that are kept."""
        return sorted(self._kept)

    def num_bytes(self) -> int:
        """Host memory that this rank's snapshots take."""
        return sum(tensor.nbytes for kept in self._kept.values() for tensor in kept)

    @torch.no_grad()
    def take(self, name: str) -> None:
        """Keep the live weights as ``name``, replacing an earlier snapshot of that name."""
        assert self._swapped_in is None, f"the weights in place are those of snapshot {self._swapped_in!r}"
        self._require_live()
        if name not in self._kept:
            self._kept[name] = [pinned_empty_like(self._platform, tensor) for tensor in self._live]
        for live, kept in zip(self._live, self._kept[name], strict=True):
            kept.copy_(live, non_blocking=True)
        synchronize(self._platform)

    def drop(self, name: str) -> None:
        """Forget a snapshot and free its memory."""
        assert name != self._swapped_in, f"snapshot {name!r} is in place; its memory holds the live weights"
        del self._kept[name]

    @contextmanager
    def swapped(self, name: str) -> Iterator[None]:
        """Within: the model computes with the weights of ``name``.  After: the live weights are back, bit for bit."""
        assert name in self._kept, f"no snapshot {name!r}; there are {self.names()}"
        assert self._swapped_in is None, f"snapshot {self._swapped_in!r} is in place already"
        self._require_live()
        self._exchange(name)
        self._swapped_in = name
        try:
            yield
        finally:
            self._swapped_in = None
            self._exchange(name)

    @torch.no_grad()
    def _exchange(self, name: str) -> None:
        # The snapshot's own memory holds the live weights meanwhile: no second copy of the model is ever needed.
        for live, kept in zip(self._live, self._kept[name], strict=True):
            held = live.clone()
            live.copy_(kept, non_blocking=True)
            kept.copy_(held, non_blocking=True)
        synchronize(self._platform)

    def _require_live(self) -> None:
        # Offloaded tensors have storages of no bytes; a copy from or to one would take the process down.
        is_here = all(tensor.untyped_storage().nbytes() for tensor in self._live)
        assert is_here, "the weights are in host memory; onload them first"
