"""Moves an engine's weights, gradients and optimizer state to host memory and back, to leave the device to the rollout.

Works on storages, not tensors: ``offload`` copies a storage out and resizes it to nothing while every view of it stays
valid, so neither Megatron's buffers nor the optimizer need to know.  Gradients are dropped and come back as zeros,
since a step clears them first.  The same bytes move on every platform; on the CPU, where "device" and host are one
memory, that is only useful to test it.

Copies run beside the computation (``parallel/copies.py``).  What a caller names as ``behind`` is still on its way when
the call returns: ``require`` orders its use after its arrival, and the device memory of what leaves is free at the next
``offload``.  Its invariant: no storage is freed and no byte used before its copy is done.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mcore_rl.parallel.copies import Copied, Copies, copies_of
from mcore_rl.parallel.device import Platform, empty_cache
from mcore_rl.parallel.pinned import side_by_side

if TYPE_CHECKING:  # the controller names parts, and has no other use for seconds of imports
    from megatron.core.distributed import DistributedDataParallel

    from mcore_rl.training.optimizer import Optimizer


class OffloadPart(Enum):
    """A part of an engine's state that moves by itself, in the order in which a training step needs them."""

    weights = "weights"
    gradients = "gradients"
    optimizer = "optimizer"


@dataclass(frozen=True)
class Moved:
    """The outcome of one ``offload`` or ``onload``: bytes moved by part, and the seconds until it returned."""

    num_bytes: dict[OffloadPart, int]
    seconds: float


@dataclass(frozen=True)
class InHost:
    """The host copy of an offloaded tensor.  unchanging: nobody writes to its memory while it is referenced."""

    tensor: Tensor
    unchanging: bool


@dataclass(eq=False)
class _Away:
    """A storage of ``num_bytes`` that is in host memory as ``kept``; None: gradients.

    leaving: the copy out that is not known to be done; until then the storage keeps its memory.
    """

    storage: torch.UntypedStorage
    num_bytes: int
    kept: Tensor | None
    leaving: Copied | None = None

    def is_copied(self) -> bool:
        """Whether the memory can be freed without waiting."""
        return self.leaving is None or self.leaving.done()

    def release(self) -> None:
        """Frees the device memory, once the copy is done."""
        if self.leaving is not None:
            self.leaving.wait()
            self.leaving = None
        self.storage.resize_(0)


class Offload:
    """Moves the state of one engine.  Moving a part that is already there does nothing.

    copies: by default those of ``platform``.
    """

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        wrapped: Sequence[DistributedDataParallel],
        optimizer: Optimizer | None,
        platform: Platform,
        copies: Copies | None = None,
    ) -> None:
        self._models = models
        self._wrapped = wrapped
        self._optimizer = optimizer
        self._platform = platform
        self._copies = copies or copies_of(platform)
        self._away: dict[OffloadPart, list[_Away]] = {}
        self._arriving: dict[OffloadPart, Copied] = {}
        self._host: dict[OffloadPart, list[Tensor]] = {}  # pinning is slow: kept for the next trip

    def is_away(self, part: OffloadPart) -> bool:
        """Whether ``part`` is in host memory now."""
        return part in self._away

    def require(self, *parts: OffloadPart, arriving: Container[OffloadPart] = ()) -> None:
        """From now on the device may use ``parts``, as soon as they have arrived.

        arriving: those of them that are not used yet; nothing waits for them.  Require them again before they are used.
        Asserts that none of ``parts`` is offloaded: a kernel that read it would crash the process.
        """
        away = [part.value for part in parts if part in self._away]
        assert not away, f"in host memory: {', '.join(away)}; onload first"
        for part in parts:
            if part not in arriving and part in self._arriving:
                self._arriving.pop(part).order()

    def away(self, tensors: Iterable[Tensor]) -> list[InHost | None]:
        """For each of ``tensors`` its host copy; None if it is on the device.  Waits for copies under way."""
        self._release_all()
        self.require(*self._arriving)
        kept = {away.storage._cdata: away.kept for parts in self._away.values() for away in parts}
        hosts = list[InHost | None]()
        for tensor in tensors:
            host = kept.get(tensor.untyped_storage()._cdata)
            if host is None:
                hosts.append(None)
                continue
            assert tensor.is_contiguous(), "what has gaps is not one range of bytes"
            begin = tensor.storage_offset() * tensor.itemsize
            part = host[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            hosts.append(InHost(part, unchanging=not self._platform.is_accelerator))
        return hosts

    def offload(
        self, parts: Iterable[OffloadPart] = tuple(OffloadPart), *, behind: Container[OffloadPart] = ()
    ) -> Moved:
        """Copy ``parts`` to pinned host memory and free their device memory.  Gradients are freed without a copy.

        behind: parts that only begin to leave.  They count as away, and the next ``offload`` frees their memory.
        """
        begin = time.perf_counter()
        wanted = set(parts)
        going = {part: self._going(part) for part in OffloadPart if part in wanted and part not in self._away}
        self._away |= going
        self._start_leaving([away for part, held in going.items() if part not in behind for away in held])
        self._release_all()
        empty_cache(self._platform)  # waits for all copies: before those that nobody is to wait for
        self._start_leaving([away for part, held in going.items() if part in behind for away in held])
        return Moved(
            {part: sum(away.num_bytes for away in held) for part, held in going.items()}, time.perf_counter() - begin
        )

    def onload(
        self, parts: Iterable[OffloadPart] = tuple(OffloadPart), *, behind: Container[OffloadPart] = ()
    ) -> Moved:
        """Bring ``parts`` back, bit for bit (gradients as zeros).

        behind: parts that only begin to come.  They have their device memory; ``require`` them before they are used.
        """
        begin = time.perf_counter()
        wanted = set(parts)
        moved = {}
        for part in OffloadPart:  # what is needed first comes first
            if part in wanted:
                coming = self._away.pop(part, [])
                moved[part] = sum(away.num_bytes for away in coming)
                self._start_arriving(part, coming)
        for part in wanted & self._arriving.keys():
            if part not in behind:
                self._arriving.pop(part).wait()
        return Moved(moved, time.perf_counter() - begin)

    def _storages(self, part: OffloadPart) -> list[torch.UntypedStorage]:
        storages = [tensor.untyped_storage() for tensor in self._tensors(part)]
        unique = {storage.data_ptr(): storage for storage in storages if storage.nbytes() > 0}
        if part is OffloadPart.optimizer:
            # A float32 model's main weights are views of its weights, and move with them.
            for tensor in self._tensors(OffloadPart.weights):
                unique.pop(tensor.untyped_storage().data_ptr(), None)
        return list(unique.values())

    def _tensors(self, part: OffloadPart) -> list[Tensor]:
        if part is OffloadPart.weights:
            return [tensor for model in self._models for tensor in (*model.parameters(), *model.buffers())]
        if part is OffloadPart.gradients:
            buffers = [buffer for chunk in self._wrapped for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
            return [buffer.grad_data for buffer in buffers]
        return [] if self._optimizer is None else self._optimizer.state_tensors()

    def _hosts(self, part: OffloadPart, sizes: Sequence[int]) -> Sequence[Tensor | None]:
        """Host memory for storages of ``sizes`` bytes, in one block; None for gradients, which come back as zeros."""
        if part is OffloadPart.gradients:
            return [None] * len(sizes)
        kept = self._host.pop(part, [])
        if [host.numel() for host in kept] != sizes:  # Adam's moments come with the first step
            del kept  # before the larger block is made
            like = [torch.empty(size, dtype=torch.uint8, device="meta") for size in sizes]
            kept = side_by_side(like, pinned=self._platform.is_accelerator)
        if self._platform.is_accelerator:
            self._host[part] = kept
        return kept

    def _going(self, part: OffloadPart) -> list[_Away]:
        self.require(part)
        storages = self._storages(part)
        hosts = self._hosts(part, [storage.nbytes() for storage in storages])
        return [_Away(storage, storage.nbytes(), kept) for storage, kept in zip(storages, hosts, strict=True)]

    def _start_leaving(self, going: Iterable[_Away]) -> None:
        """Start the copies of ``going``, and free the memory of those that are done meanwhile."""
        queue = deque[_Away]()
        for away in going:
            if away.kept is None:
                away.release()
                continue
            away.leaving = self._copies.start([(away.kept, _bytes_of(away.storage))])
            queue.append(away)
            while queue and queue[0].is_copied():
                queue.popleft().release()

    def _release_all(self) -> None:
        """Wait for the copies of all that leaves, and free its memory."""
        leaving = [away for held in self._away.values() for away in held if away.leaving is not None]
        for away in leaving:
            away.release()
        if leaving:
            empty_cache(self._platform)

    def _start_arriving(self, part: OffloadPart, coming: Sequence[_Away]) -> None:
        pairs = []
        for away in coming:
            away.release()
            away.storage.resize_(away.num_bytes)
            if away.kept is None:
                _bytes_of(away.storage).zero_()
            else:
                pairs.append((_bytes_of(away.storage), away.kept))
        if pairs:
            self._arriving[part] = self._copies.start(pairs)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """The memory of ``storage``, as a tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload,no-any-return]
