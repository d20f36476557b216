"""How a worker's process is set while weights arrive, and as it was again afterwards: memory, and threads.

Memory that the system has just given costs more to touch for the first time than to fill: 0.25 s per GB, of pages of
4 KiB, and 0.6 to 0.9 s on a virtual machine that hands free pages back to its host.  An update on the CPU allocates as
much as it frees: each layer is packed anew.  So what is freed is kept and used again until the update is over; then all
that nobody needs goes back at once.  By glibc's ``mallopt``; with another C library nothing is done, and updates are
slower.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from threading import Condition, Lock
from typing import TypeVar

import torch
from torch import Tensor

from mcore_rl.parallel.device import trim_heap

T = TypeVar("T")

# malloc.h of glibc, and the values that its own adjustment ends at (malloc.c, 2.36: DEFAULT_MMAP_MAX,
# DEFAULT_MMAP_THRESHOLD_MAX and twice that).
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
DEFAULTS = {M_MMAP_MAX: 1 << 16, M_MMAP_THRESHOLD: 32 << 20, M_TRIM_THRESHOLD: 64 << 20}


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """What is freed in here serves what is allocated in here; at the end what is free is given back to the system."""
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


@contextmanager
def one_thread() -> Iterator[None]:
    """This thread computes alone.

    For what is done beside a transport's own threads: one core keeps up with them, and threads that wait for one
    another would take theirs.
    """
    num_threads = torch.get_num_threads()
    torch._C.set_num_threads(1)  # torch's own, which vLLM replaces (v1/worker/cpu_worker.py, 0.32)
    try:
        yield
    finally:
        torch._C.set_num_threads(num_threads)


def beside(items: Iterator[T], num_bytes: Callable[[T], int], most: int) -> Generator[T]:
    """The items, which a thread of its own makes while they are used: the next one, and ``most`` bytes beyond it.

    Until all are made this thread computes alone, see ``one_thread``.
    """
    made, changed, over = deque[T](), Condition(), False

    def make() -> None:
        for item in items:
            with changed:
                made.append(item)
                changed.notify()
                changed.wait_for(lambda: over or sum(map(num_bytes, made)) <= most)
                if over:
                    return

    def notify(_: object) -> None:
        with changed:
            changed.notify()

    with ThreadPoolExecutor(1) as thread, ExitStack() as alone:
        alone.enter_context(one_thread())
        making = thread.submit(make)
        making.add_done_callback(notify)
        try:
            while True:
                with changed:
                    changed.wait_for(lambda: made or making.done())
                    if not made:
                        break
                    item = made.popleft()
                    changed.notify()
                if making.done():
                    alone.close()
                yield item
            making.result()
        finally:
            with changed:
                over = True
                changed.notify()


class Blocks:
    """Memory that is lent, taken back and lent again, by any thread, until all of it is dropped with this."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: list[tuple[int, Tensor]] = []  # sizes beside: to ask tensors for theirs takes longer than the rest
        self._lock = Lock()

    def lend(self, num_bytes: int) -> Tensor:
        """Uint8 [at least num_bytes, at most twice that], of any content: the smallest free one, or a new one."""
        with self._lock:
            fitting = [(size, at) for at, (size, _) in enumerate(self._free) if num_bytes <= size <= 2 * num_bytes]
            if fitting:
                return self._free.pop(min(fitting)[1])[1]
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def take_back(self, block: Tensor) -> None:
        """What ``lend`` gave."""
        with self._lock:
            self._free.append((block.nbytes, block))
