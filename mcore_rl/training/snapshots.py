"""Named copies of the model's weights in host memory, swapped in for a pass and out again.

The reference policy is such a snapshot of the actor, not a second model.  Some snapshots follow the live weights
(``Moves``).  A snapshot holds only the weights that the forward pass reads and that train: of a LoRA run the adapters.
Where these are new, the run's first weights are the base: nothing of them is kept, and the pass has adapters off.
A swap leaves the optimizer's main weights, moments and gradients alone, so no step may run in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from mcore_rl.config.role import ExponentialAverage, Moves, Never
from mcore_rl.parallel.device import Platform, synchronize
from mcore_rl.parallel.pinned import side_by_side
from mcore_rl.training.adapters import adapters_off


class Snapshots:
    """The snapshots of one engine's model chunks on this rank."""

    def __init__(self, chunks: Sequence[torch.nn.Module], platform: Platform) -> None:
        frozen = {id(each) for chunk in chunks for each in chunk.parameters() if not each.requires_grad}
        tensors = [tensor for chunk in chunks for tensor in (*chunk.parameters(), *chunk.buffers())]
        self._live = [tensor for tensor in tensors if id(tensor) not in frozen]
        self._buffers = [tensor for chunk in chunks for tensor in chunk.buffers()]
        self._chunks = chunks
        self._platform = platform
        self._kept: dict[str, list[Tensor]] = {}
        self._moves: dict[str, Moves] = {}
        self._means: dict[str, list[Tensor]] = {}  # float32, of those that are averages
        self._base = set[str]()  # names of those that are the base of new adapters, and keep buffers alone
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
        tensors = [tensor for kept in (*self._kept.values(), *self._means.values()) for tensor in kept]
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())

    def moving(self) -> list[str]:
        """Names of those that follow the live weights, and so are part of a checkpoint."""
        return sorted(name for name, moves in self._moves.items() if not isinstance(moves, Never))

    def tensors(self, name: str) -> dict[int, Tensor]:
        """By the id of the live tensor, what snapshot ``name`` goes on from: its weights, or their float32 mean."""
        assert name != self._swapped_in, f"snapshot {name!r} is in place; its memory holds the live weights"
        held = self._means.get(name, self._kept[name])
        return {id(live): tensor for live, tensor in zip(self._live, held, strict=True)}

    def loaded(self, name: str) -> None:
        """``tensors(name)`` were written: score with them from now on."""
        for kept, mean in zip(self._kept[name], self._means.get(name, self._kept[name]), strict=True):
            kept.copy_(mean)

    @torch.no_grad()
    def take(self, name: str, moves: Moves | None = None, *, base: bool = False) -> None:
        """Keep the live weights as ``name``, replacing an earlier snapshot of that name.

        moves: how ``move`` brings it after the live weights; None is as before, at first never.
        base: they are those of new adapters, that add nothing yet, and never move; true on all ranks or on none.
        """
        assert self._swapped_in is None, f"the weights in place are those of snapshot {self._swapped_in!r}"
        self._require_live()
        if base != (name in self._base):
            self._kept.pop(name, None)
            self._base ^= {name}
        if name not in self._kept:
            self._kept[name] = side_by_side(self._held(name), pinned=self._platform.is_accelerator)
        for live, kept in zip(self._held(name), self._kept[name], strict=True):
            kept.copy_(live, non_blocking=True)
        synchronize(self._platform)
        self._moves[name] = moves or self._moves.get(name, Never())
        if isinstance(self._moves[name], ExponentialAverage):
            self._means[name] = [kept.float() if kept.is_floating_point() else kept for kept in self._kept[name]]

    @torch.no_grad()
    def move(self, name: str) -> None:
        """Bring snapshot ``name`` after the live weights, as it was taken to."""
        moves = self._moves[name]
        if not isinstance(moves, ExponentialAverage):
            self.take(name)
            return
        assert self._swapped_in is None, f"the weights in place are those of snapshot {self._swapped_in!r}"
        self._require_live()
        for live, mean in zip(self._live, self._means[name], strict=True):
            if live.is_floating_point():
                # Two products and a sum, each rounded: no layout fuses them in another way.
                mean.copy_(mean.to(live.device) * moves.decay + live.float() * (1 - moves.decay))
            else:
                mean.copy_(live)
        synchronize(self._platform)
        self.loaded(name)

    def drop(self, name: str) -> None:
        """Forget a snapshot and free its memory."""
        assert name != self._swapped_in, f"snapshot {name!r} is in place; its memory holds the live weights"
        del self._kept[name], self._moves[name]
        self._means.pop(name, None)
        self._base.discard(name)

    @contextmanager
    def swapped(self, name: str) -> Iterator[None]:
        """Within: the model computes with the weights of ``name``.  After: the live weights are back, bit for bit."""
        assert name in self._kept, f"no snapshot {name!r}; there are {self.names()}"
        assert self._swapped_in is None, f"snapshot {self._swapped_in!r} is in place already"
        self._require_live()
        self._exchange(name)
        self._swapped_in = name
        try:
            with adapters_off(self._chunks) if name in self._base else nullcontext():
                yield
        finally:
            self._swapped_in = None
            self._exchange(name)

    @torch.no_grad()
    def _exchange(self, name: str) -> None:
        # The snapshot's own memory holds the live weights meanwhile: no second copy of the model is ever needed.
        for live, kept in zip(self._held(name), self._kept[name], strict=True):
            held = live.clone()
            live.copy_(kept, non_blocking=True)
            kept.copy_(held, non_blocking=True)
        synchronize(self._platform)

    def _held(self, name: str) -> list[Tensor]:
        """The live tensors of which snapshot ``name`` has others."""
        return self._buffers if name in self._base else self._live

    def _require_live(self) -> None:
        # Offloaded tensors have storages of no bytes; a copy from or to one would take the process down.
        is_here = all(tensor.untyped_storage().nbytes() for tensor in self._live)
        assert is_here, "the weights are in host memory; onload them first"
