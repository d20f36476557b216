"""Moves an engine's weights, gradients and optimizer state to host memory and back, to leave the device to the rollout.

Works on storages, not tensors: ``offload`` copies a storage out and resizes it to nothing while every view of it stays
valid, so neither Megatron's buffers nor the optimizer need to know.  Gradients are dropped and come back as zeros,
since a step clears them first.  The same bytes move on every platform; on the CPU, where "device" and host are one
memory, that is only useful to test it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mcore_rl.parallel.device import Platform, empty_cache, synchronize
from mcore_rl.parallel.pinned import side_by_side

if TYPE_CHECKING:  # the controller names parts, and has no other use for seconds of imports
    from megatron.core.distributed import DistributedDataParallel

    from mcore_rl.training.optimizer import Optimizer


class OffloadPart(Enum):
    """A part of an engine's state that moves by itself."""

    weights = "weights"
    gradients = "gradients"
    optimizer = "optimizer"


@dataclass(frozen=True)
class Moved:
    """The outcome of one ``offload`` or ``onload``: bytes moved by part, and the seconds it took."""

    num_bytes: dict[OffloadPart, int]
    seconds: float


@dataclass(frozen=True)
class InHost:
    """The host copy of an offloaded tensor.  unchanging: nobody writes to its memory while it is referenced."""

    tensor: Tensor
    unchanging: bool


@dataclass
class _Away:
    storage: torch.UntypedStorage
    num_bytes: int
    kept: Tensor | None


class Offload:
    """Moves the state of one engine.  Moving a part that is already there does nothing."""

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        wrapped: Sequence[DistributedDataParallel],
        optimizer: Optimizer | None,
        platform: Platform,
    ) -> None:
        self._models = models
        self._wrapped = wrapped
        self._optimizer = optimizer
        self._platform = platform
        self._away: dict[OffloadPart, list[_Away]] = {}
        self._host: dict[OffloadPart, list[Tensor]] = {}  # pinning is slow: kept for the next trip

    def is_away(self, part: OffloadPart) -> bool:
        """Whether ``part`` is in host memory now."""
        return part in self._away

    def require(self, *parts: OffloadPart) -> None:
        """Assert that none of ``parts`` is offloaded: a kernel that read it would crash the process."""
        away = [part.value for part in parts if part in self._away]
        assert not away, f"in host memory: {', '.join(away)}; onload first"

    def away(self, tensors: Iterable[Tensor]) -> list[InHost | None]:
        """For each of ``tensors`` its host copy; None if it is on the device."""
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

    def offload(self, parts: Iterable[OffloadPart] = tuple(OffloadPart)) -> Moved:
        """Copy ``parts`` to pinned host memory and free their device memory.  Gradients are freed without a copy."""
        begin, moved = time.perf_counter(), {}
        for part in parts:
            if part in self._away:
                continue
            storages = self._storages(part)
            hosts = self._hosts(part, [storage.nbytes() for storage in storages])
            self._away[part] = [self._send_away(*pair) for pair in zip(storages, hosts, strict=True)]
            moved[part] = sum(away.num_bytes for away in self._away[part])
        synchronize(self._platform)
        empty_cache(self._platform)
        return Moved(moved, time.perf_counter() - begin)

    def onload(self, parts: Iterable[OffloadPart] = tuple(OffloadPart)) -> Moved:
        """Bring ``parts`` back, bit for bit (gradients as zeros)."""
        begin, moved = time.perf_counter(), {}
        for part in parts:
            moved[part] = sum(self._bring_back(away) for away in self._away.pop(part, []))
        synchronize(self._platform)
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

    def _send_away(self, storage: torch.UntypedStorage, kept: Tensor | None) -> _Away:
        num_bytes = storage.nbytes()
        if kept is not None:
            view = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]
            kept.copy_(view, non_blocking=True)
            synchronize(self._platform)  # before the storage is freed
        storage.resize_(0)
        return _Away(storage, num_bytes, kept)

    def _bring_back(self, away: _Away) -> int:
        away.storage.resize_(away.num_bytes)
        view = torch.empty(0, dtype=torch.uint8, device=away.storage.device).set_(away.storage)  # type: ignore[call-overload]
        if away.kept is None:
            view.zero_()
        else:
            view.copy_(away.kept, non_blocking=True)
        return away.num_bytes
