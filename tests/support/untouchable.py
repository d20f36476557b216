"""Memory as an accelerator's is to the host: whoever touches it outside a kernel or the vendor's library ends.

Tensors of the arena are ordinary to torch, but their pages may be neither read nor written, except while an operator of
torch runs (``Kernels``, as a kernel on a device would) and while the vendor's library moves them (``Library``).  All
else, such as gloo's own threads, Python's buffers or a copy by address, is a segmentation fault.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

NONE, READ_WRITE = 0, 3  # PROT_* of mman.h
PRIVATE_ANONYMOUS, SHARED = 0x22, 0x01
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
LIBC.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Arena:
    """All device memory that this process maps; none of it is freed.  As ``SlotMemory``, what two processes share."""

    scarce = False

    def __init__(self) -> None:
        self._regions: list[tuple[int, int]] = []
        self._depth, self._lock = 0, RLock()

    def empty(self, num_bytes: int) -> Tensor:
        """New memory: uint8 [num_bytes]."""
        return self._mapped(num_bytes, PRIVATE_ANONYMOUS, -1)

    def create(self, num_bytes: int) -> tuple[Tensor, bytes]:
        """See ``SlotMemory.create``."""
        descriptor = os.memfd_create("untouchable", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, num_bytes)
        return self._mapped(num_bytes, SHARED, descriptor), f"{num_bytes} {os.getpid()} {descriptor}".encode()

    def map(self, handle: bytes) -> Tensor:
        """See ``SlotMemory.map``."""
        num_bytes, owner, descriptor = map(int, handle.split())
        own = os.open(f"/proc/{owner}/fd/{descriptor}", os.O_RDWR)
        return self._mapped(num_bytes, SHARED, own)

    def settle(self) -> None:
        """See ``SlotMemory.settle``."""

    def forget(self, handle: bytes) -> None:
        """See ``SlotMemory.forget``."""

    def _mapped(self, num_bytes: int, flags: int, descriptor: int) -> Tensor:
        if not num_bytes:
            return torch.frombuffer(bytearray(1), dtype=torch.uint8)[:0]
        with self._lock:
            begin = LIBC.mmap(None, num_bytes, READ_WRITE if self._depth else NONE, flags, descriptor, 0)
            self._regions.append((begin, num_bytes))
        return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(begin), dtype=torch.uint8)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Within: it may be touched, by any thread."""
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                self._protect(READ_WRITE)
            try:
                yield
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self._protect(NONE)

    def _protect(self, how: int) -> None:
        for begin, size in self._regions:
            assert LIBC.mprotect(begin, size, how) == 0, "mprotect"


class Kernels(TorchDispatchMode):
    """While active, operators of torch may touch ``arena``, and new memory of bytes is there."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self.arena = arena

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.empty.memory_format and (kwargs or {}).get("dtype") == torch.uint8:
            return self.arena.empty(*args[0])
        with self.arena.open():
            return func(*args, **(kwargs or {}))


class Work:
    """Of one batch: done when the library has run it."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run: Callable[[], None] | None = run

    def is_completed(self) -> bool:
        self.wait()
        return True

    def wait(self, timeout: object = None) -> None:
        run, self._run = self._run, None
        if run is not None:
            run()


class Library:
    """The vendor's library, over a gloo group: it stages what it sends and receives through host memory of its own.

    It takes transfers only in batches, as ``Exchange`` must give them, and counts those.
    """

    def __init__(self, group: Any, arena: Arena) -> None:
        self.group, self.arena = group, arena
        self.num_batches = 0
        self._batch: list[tuple[str, Tensor, int]] | None = None

    def allreduce(self, tensors: list[Tensor]) -> Any:
        return self.group.allreduce(tensors)

    def _start_coalescing(self, device: torch.device) -> None:
        self._batch = []

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> None:
        assert self._batch is not None, "a communicator for each pair"
        self._batch.append(("send", tensors[0], peer))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> None:
        assert self._batch is not None, "a communicator for each pair"
        self._batch.append(("recv", tensors[0], peer))

    def _end_coalescing(self, device: torch.device) -> Work:
        batch, self._batch = self._batch or [], None
        self.num_batches += 1
        with self.arena.open():
            hosts = [torch.from_numpy(tensor.numpy().copy()) for _, tensor, _ in batch]
        works = [getattr(self.group, how)([host], peer, 0) for (how, _, peer), host in zip(batch, hosts, strict=True)]

        def run() -> None:
            for work in works:
                work.wait()
            with self.arena.open():
                for (how, tensor, _), host in zip(batch, hosts, strict=True):
                    if how == "recv":
                        tensor.numpy()[:] = host.numpy()

        return Work(run)

    def abort(self) -> None:
        self.group.shutdown()
