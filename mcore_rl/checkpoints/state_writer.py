"""Writes a rank's file, at once or in the background: tensors are copied to host memory, and a thread writes the copy.

The host memory is kept from one save to the next, page-locked where that makes copies from a device faster: allocating
it costs several times as much as filling it.  Tensors that nobody changes are not copied.  The writer sums the file as
it writes, and flushes it to the disk before it counts as written.  Errors are not raised in the run; they are in the
outcome.

At most one file is being written.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from mcore_rl.checkpoints.manifest import BLOCK_BYTES, FileSum, sum_text
from mcore_rl.checkpoints.safetensors import WINDOW_BYTES, TensorSpec, encode_header, tensor_bytes
from mcore_rl.ground.errors import CheckpointError
from mcore_rl.parallel.device import Platform, num_cores, pinned_empty_like, synchronize

MAX_COPIERS = 8  # threads


@dataclass(frozen=True)
class Written:
    """The outcome of writing a file.

    sum: length and checksum; None if it failed.  problem: why it failed, else None.  seconds: time that it took.
    """

    name: str
    sum: FileSum | None
    problem: str | None
    seconds: float


class StateWriter:
    """Writes the files of one rank, one at a time."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._host: Tensor | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[Written] | None = None

    def begin(
        self,
        path: Path,
        tensors: Mapping[str, Tensor],
        metadata: Mapping[str, str],
        *,
        behind: bool,
        unchanging: Collection[str] = (),
        beside: Callable[[], None] = lambda: None,
    ) -> None:
        """Write ``tensors`` to ``path``.  Once this returns, the caller may change them, except ``unchanging`` ones.

        behind: return when the tensors are copied and write in a thread; else return when they are written, without
        host memory.  beside: called first, in the thread that writes; its error becomes the outcome's problem.
        """
        assert self._writing is None or self._writing.done(), "a file is on its way: wait for its outcome"
        specs = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
        header, placed = encode_header(specs, path, metadata)
        ordered = {name: tensors[name].detach() for name in placed}
        if behind:
            copies = self._copies({name: each for name, each in ordered.items() if name not in unchanging})
            parts = [tensor_bytes(copies.get(name, tensor)) for name, tensor in ordered.items()]
            self._writing = self._thread.submit(_write, path, [memoryview(header), *parts], beside)
        else:
            self._writing = Future()
            live = (part for tensor in ordered.values() for part in _windows(tensor))
            self._writing.set_result(_write(path, _after(header, live), beside))

    def outcome(self) -> Written | None:
        """The outcome of the file that was begun last; None while it is being written."""
        assert self._writing is not None, "nothing was begun"
        return self._writing.result() if self._writing.done() else None

    def _copies(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of ``tensors``, side by side in host memory; the widest dtype comes first, so that all are aligned."""
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        if self._host is None or self._host.numel() < num_bytes:
            self._host = None  # before the larger one is made
            self._host = pinned_empty_like(self._platform, torch.empty(num_bytes, dtype=torch.uint8, device="meta"))
        begin = 0
        copies = dict[str, Tensor]()
        for name, tensor in tensors.items():
            copies[name] = self._host[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            begin += tensor.nbytes
        pairs = [pair for name, tensor in tensors.items() for pair in _slices(copies[name], tensor)]
        # One core does not fill the memory's channels; a device's copies are queued, and done at once.
        with ThreadPoolExecutor(min(MAX_COPIERS, num_cores())) as pool:
            list(pool.map(lambda pair: pair[0].copy_(pair[1], non_blocking=True), pairs))
        synchronize(self._platform)
        return copies


def _slices(target: Tensor, source: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of parts of at most ``WINDOW_BYTES``; one pair if ``source`` is not contiguous host memory."""
    if source.device.type != "cpu" or not source.is_contiguous():
        yield target, source
        return
    step = WINDOW_BYTES // source.itemsize
    yield from zip(torch.split(target.view(-1), step), torch.split(source.view(-1), step), strict=True)


def _windows(tensor: Tensor) -> Iterator[memoryview]:
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    for begin in range(0, len(flat), WINDOW_BYTES):
        yield tensor_bytes(flat[begin : begin + WINDOW_BYTES].cpu())


def _after(header: bytes, parts: Iterable[memoryview]) -> Iterator[memoryview]:
    yield memoryview(header)
    yield from parts


def _write(path: Path, parts: Iterable[memoryview], beside: Callable[[], None]) -> Written:
    begin = time.perf_counter()
    try:
        beside()
        file_sum = _write_through(path, parts)
    except (OSError, CheckpointError) as error:
        problem = str(error)
        if isinstance(error, OSError):
            problem = f"{error.filename or path} cannot be written: {error.strerror}"
        return Written(path.name, None, problem, time.perf_counter() - begin)
    return Written(path.name, file_sum, None, time.perf_counter() - begin)


def _write_through(path: Path, parts: Iterable[memoryview]) -> FileSum:
    """Write, sum and flush.  Neither summing nor writing holds the GIL, so the run goes on."""
    hashed = xxhash.xxh3_64()
    size = 0
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        for part in parts:
            for begin in range(0, len(part), BLOCK_BYTES):
                block = part[begin : begin + BLOCK_BYTES]
                hashed.update(block)
                size += len(block)
                while block:  # a nearly full disk takes a part of it first
                    block = block[os.write(file, block) :]
        os.fsync(file)
    finally:
        os.close(file)
    return FileSum(size, sum_text(hashed))
