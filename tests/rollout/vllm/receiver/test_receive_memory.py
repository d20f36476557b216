"""What a worker's process is while weights arrive: memory is used again and given back, threads end."""

from __future__ import annotations

import itertools
import multiprocessing
import platform
import resource
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, nullcontext

import psutil
import pytest
import torch

from mcore_rl.rollout.vllm.receiver.receive_memory import Blocks, beside, freed_memory_kept
from tests.support.skips import KERNEL

NUM_ROUNDS, NUM_BLOCKS, BLOCK_BYTES = 8, 4, 40 << 20  # more than glibc ever takes from its heap by itself
PAGES = NUM_BLOCKS * BLOCK_BYTES // resource.getpagesize()


def test_blocks_are_lent_again_the_smallest_that_is_large_enough() -> None:
    blocks = Blocks(torch.device("cpu"))
    large, small = blocks.lend(100), blocks.lend(50)
    assert (len(large), len(small), large.dtype) == (100, 50, torch.uint8)
    assert blocks.lend(10).data_ptr() not in {large.data_ptr(), small.data_ptr()}, "both are lent"
    for block in (large, small):
        blocks.take_back(block)
    assert blocks.lend(40) is small
    assert blocks.lend(50) is large, "and it keeps its size"
    blocks.take_back(large)
    assert len(blocks.lend(101)) == 101
    assert len(blocks.lend(49)) == 49, "less than half would be wasted, and large blocks missing in the end"
    assert blocks.lend(100) is large


def test_items_are_made_beside_and_no_further_than_allowed() -> None:
    """The user takes its time with the first: the thread goes on until ``most`` is waiting, and one more."""
    made: list[int] = []
    threads: set[int] = set()
    enough = threading.Event()

    def items() -> Iterator[int]:
        for size in (1, 2, 3, 4, 5):
            threads.add(threading.get_ident())
            made.append(size)
            if sum(made[1:]) > 4:
                enough.set()
            yield size

    yielded = beside(items(), int, most=4)
    first = next(yielded)
    assert enough.wait(10)
    assert made == [1, 2, 3], "2 fits, and 3 is the one that no longer does"
    assert [first, *yielded] == [1, 2, 3, 4, 5]
    assert len(threads) == 1
    assert threads.isdisjoint({threading.get_ident()})


def test_what_fails_in_either_thread_is_heard_and_ends_both() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise ValueError("no second one")

    with pytest.raises(ValueError, match="no second one"):
        list(beside(broken(), int, most=0))
    before = threading.active_count()

    def stops_at_the_fifth() -> None:
        with closing(beside(itertools.count(1), int, most=10)) as endless:
            for item in endless:
                assert threading.active_count() > before
                if item == 5:
                    raise KeyError

    with pytest.raises(KeyError):
        stops_at_the_fifth()
    assert threading.active_count() == before


def _faults_and_growth(keep: bool, num_blocks: int = NUM_BLOCKS, num_bytes: int = BLOCK_BYTES) -> tuple[list[int], int]:
    """Pages touched for the first time in each round of filling blocks, and bytes that the process has more at the end.

    As in an update: all of a round's blocks are freed before those of the next are allocated.
    """
    resident = psutil.Process().memory_info().rss
    measured = []
    with freed_memory_kept() if keep else nullcontext():
        for _ in range(NUM_ROUNDS):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            blocks = [torch.empty(num_bytes, dtype=torch.uint8).fill_(1) for _ in range(num_blocks)]
            del blocks
            measured.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return measured, psutil.Process().memory_info().rss - resident


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason=f"{KERNEL}by glibc's mallopt")
@pytest.mark.usefixtures("processes")
def test_freed_memory_is_used_again_and_goes_back_at_the_end() -> None:
    """After some rounds: glibc asks for a little more room than a block has (memalign), so that blocks have to meet."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as processes:
        without, _ = processes.submit(_faults_and_growth, False).result()
        kept, growth = processes.submit(_faults_and_growth, True).result()
        # One block that no room of the heap's can take, whatever lies between the blocks that were freed there.
        after, _ = processes.submit(_faults_and_growth, False, 1, 2 * NUM_BLOCKS * BLOCK_BYTES).result()
    assert min(without) >= PAGES, "else nothing is proven here"
    assert kept[-1] <= PAGES // 2
    assert growth < BLOCK_BYTES
    assert min(after) >= 2 * PAGES, "such blocks come from the system again"
