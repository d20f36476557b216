"""Memory and threads of a worker's process while weights arrive; the memory is reset afterwards.

New memory from the system costs more to touch for the first time than to fill: 0.25 s per GB with pages of 4 KiB, and
0.6 to 0.9 s on a virtual machine that returns free pages to its host.  An update on the CPU allocates as much as it
frees, because it packs each layer again.  So the process reuses freed memory until the update is over, and then returns
all free memory at once.  This uses glibc's ``mallopt``; with another C library nothing is done, and updates are slower.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Condition, Lock
from typing import TypeVar

import torch
from torch import Tensor

from mcore_rl.parallel.device import trim_heap

T = TypeVar("T")

# malloc.h of glibc, and the final values of its own adjustment (malloc.c, 2.36: DEFAULT_MMAP_MAX,
# DEFAULT_MMAP_THRESHOLD_MAX and twice that).
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_MMAP_MAX = -4
DEFAULTS = {M_MMAP_MAX: 1 << 16, M_MMAP_THRESHOLD: 32 << 20, M_TRIM_THRESHOLD: 64 << 20}


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Within: the process keeps freed memory for later allocations.  At the end: free memory returns to the system."""
    _mallopt({M_MMAP_MAX: 0, M_TRIM_THRESHOLD: -1})  # all in the heap, which never shrinks
    try:
        yield
    finally:
        _mallopt(DEFAULTS)
        trim_heap()


def _mallopt(options: Mapping[int, int]) -> None:
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        for option, value in options.items():
            libc.mallopt(option, value)


def beside(items: Iterator[T], num_bytes: Callable[[T], int], most: int) -> Generator[T]:
    """Yields ``items``, which another thread makes ahead: the next item, and up to ``most`` bytes more.

    torch's number of threads stays: vLLM 0.32 shares matrix products between all layers of one shape
    (csrc/cpu/dnnl_helper.cpp, ``ClassMatmulCacheKey``), and the layout that oneDNN packs a weight into depends on that
    number, so a layer that is packed under another one computes with its elements at the wrong places.
    """
    ready = deque[T]()
    changed = Condition()
    stopped = False

    def make() -> None:
        for item in items:
            with changed:
                ready.append(item)
                changed.notify()
                changed.wait_for(lambda: stopped or sum(map(num_bytes, ready)) <= most)
                if stopped:
                    return

    def notify(_: object) -> None:
        with changed:
            changed.notify()

    with ThreadPoolExecutor(1) as thread:
        making = thread.submit(make)
        making.add_done_callback(notify)
        try:
            while True:
                with changed:
                    changed.wait_for(lambda: ready or making.done())
                    if not ready:
                        break
                    item = ready.popleft()
                    changed.notify()
                yield item
            making.result()
        finally:
            with changed:
                stopped = True
                changed.notify()


class Blocks:
    """A pool of memory blocks, for any thread; the memory is freed with the pool."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: list[tuple[int, Tensor]] = []  # (size, block): asking a tensor for its size is slow
        self._lock = Lock()

    def lend(self, num_bytes: int) -> Tensor:
        """A block, uint8 [num_bytes to twice that], of any content: the smallest free one that fits, or a new one."""
        with self._lock:
            fitting = [(size, at) for at, (size, _) in enumerate(self._free) if num_bytes <= size <= 2 * num_bytes]
            if fitting:
                return self._free.pop(min(fitting)[1])[1]
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def take_back(self, block: Tensor) -> None:
        """Return a block that ``lend`` gave."""
        with self._lock:
            self._free.append((block.nbytes, block))
