"""Writing a Hugging Face weights directory: safetensors shards planned before the first byte, filled in any order.

All names, dtypes and shapes are known at the start, so every tensor has its place in a file, and whole tensors or
regions are written there as they come; nothing is collected.  Everything happens in ``NAME.incomplete`` beside the
final ``NAME``, which appears by one rename when every byte was written once and is on the disk.

After an interruption (an exception, Ctrl-C, a kill, a tensor that never came) the files stay in ``NAME.incomplete``:
they show what is missing, the name says that it is no checkpoint, and deleting a user's files is the user's decision;
the next attempt asks for it.  The caller puts other files of the checkpoint (config.json, the tokenizer) into
``ShardedWriter.incomplete`` before ``finish``.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import Tensor

from mcore_rl.checkpoints.hf_directory import INDEX, SINGLE
from mcore_rl.checkpoints.new_directory import NewDirectory
from mcore_rl.checkpoints.safetensors import (
    DTYPE_NAMES,
    WINDOW_BYTES,
    TensorInfo,
    TensorSpec,
    encode_header,
    in_groups,
    tensor_bytes,
)
from mcore_rl.ground.errors import CheckpointError
from mcore_rl.weights.tensor_slice import TensorSlice, is_one_run, offset_of, row_major_strides, windows
from mcore_rl.weights.views import view_of

SHARD_BYTES = 5_000_000_000  # what published checkpoints use
HEADER_BYTES = 256  # of one tensor, roughly: to estimate the space that is needed
FORMAT = {"format": "pt"}  # transformers refuses a file without it


def plan_shards(specs: Sequence[TensorSpec], max_shard_bytes: int) -> dict[str, list[TensorSpec]]:
    """File name -> its tensors: ``specs`` in their order, a new file where one would exceed ``max_shard_bytes``.

    A larger tensor has a file of its own.  Names as huggingface_hub's ``split_state_dict_into_shards_factory``.
    """
    shards = in_groups(specs, max_shard_bytes)
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{index:05}-of-{len(shards):05}.safetensors": shard for index, shard in enumerate(shards, 1)}


def _spec_problems(specs: Sequence[TensorSpec]) -> Iterator[str]:
    for name, count in Counter(spec.name for spec in specs).items():
        if count > 1:
            yield f"tensor {name} is to be written {count} times. Every name must stand for one tensor"
    for spec in specs:
        if spec.dtype not in DTYPE_NAMES:
            yield f"tensor {spec.name} has dtype {spec.dtype}, which safetensors does not have. Cast it"


class ShardedWriter:
    """Writes one directory.  Leaving a ``with`` finishes the directory, or aborts after an exception."""

    def __init__(
        self,
        directory: Path | str,
        specs: Sequence[TensorSpec],
        *,
        max_shard_bytes: int = SHARD_BYTES,
        metadata: Mapping[str, str] | None = None,
        joins: bool = False,
        spelled: Callable[[str], str] = str,
    ) -> None:
        """Plan ``specs`` into shards of at most ``max_shard_bytes`` and write their headers.

        metadata: for the header of every file, beside ``FORMAT``.  joins: another process made the same plan and wrote
        the headers; this process writes into those files and calls ``leave``; the other then calls ``note_written`` and
        ``finish``.  spelled: the name in the files of each of ``specs``.

        Raises CheckpointError with every violation: ``directory`` exists and is not an empty directory, an
        ``.incomplete`` one is left from before, too little free space, a name that occurs twice, a dtype that the
        format does not have.
        """
        assert specs, "a checkpoint of nothing"
        if problems := list(_spec_problems(specs)):
            raise CheckpointError(str(directory), problems)
        self.joins = joins
        self.finished = False
        shards = plan_shards(specs, max_shard_bytes)
        needed = sum(spec.num_bytes for spec in specs) + HEADER_BYTES * len(specs)
        self.directory = NewDirectory(directory, needed, joins=joins)
        self.incomplete = self.directory.incomplete
        self._tensors: dict[str, TensorInfo] = {}
        self._written: dict[str, list[TensorSlice]] = {spec.name: [] for spec in specs}
        self._left = {self.incomplete / shard: sum(spec.num_bytes for spec in held) for shard, held in shards.items()}
        self._files: dict[Path, int] = {}
        headers = {}
        for shard, held in shards.items():
            path = self.incomplete / shard
            in_files = {spelled(spec.name): spec for spec in held}
            renamed = [replace(spec, name=name) for name, spec in in_files.items()]
            headers[path], tensors = encode_header(renamed, path, {**FORMAT, **(metadata or {})})
            self._tensors |= {in_files[name].name: info for name, info in tensors.items()}
        if joins:
            return
        for path, header in headers.items():
            with self.directory.disk_errors(path), path.open("xb") as file:
                file.write(header)

    def write(self, name: str, tensor: Tensor) -> None:
        """``write_slice`` for all of tensor ``name``."""
        planned = self._tensors.get(name)
        self.write_slice(name, TensorSlice.whole(tensor.shape if planned is None else planned.shape), tensor)

    def write_slice(self, name: str, region: TensorSlice, tensor: Tensor) -> None:
        """Write ``tensor`` to ``region`` of tensor ``name``: from any device, with any strides, of the planned dtype.

        A contiguous CPU tensor is written from its own memory, anything else by parts of at most ``WINDOW_BYTES``.
        CheckpointError: a name, dtype or shape that was not planned; elements already written; the disk is full.
        """
        self._check(name, region, tensor)
        info = self._tensors[name]
        with self.directory.disk_errors(info.file):
            if tensor.is_contiguous() and tensor.device.type == "cpu":
                self._put(info, region, tensor)
            else:
                limit = WINDOW_BYTES // info.dtype.itemsize
                for part in windows(TensorSlice.whole(tensor.shape), row_major_strides(tensor.shape), limit):
                    start = tuple(begin + more for begin, more in zip(region.start, part.start, strict=True))
                    self._put(info, TensorSlice(start, part.shape), view_of(tensor, part).detach().cpu().contiguous())
        self.note_written(name, region)

    def note_written(self, name: str, region: TensorSlice) -> None:
        """Count ``region`` of tensor ``name`` as written, here or by a process that joined and has left."""
        info = self._tensors[name]
        assert not any(region.overlaps(other) for other in self._written[name]), f"{name}: two wrote {region}"
        self._written[name].append(region)
        self._left[info.file] -= prod(region.shape) * info.dtype.itemsize
        if self._left[info.file] == 0:
            self._close(info.file)

    def leave(self) -> None:
        """For a writer that joins: wait until its bytes are on the disk.  CheckpointError: the disk failed."""
        assert self.joins, "the one that wrote the headers finishes"
        for path, file in self._files.items():
            with self.directory.disk_errors(path):
                os.fsync(file)
        for path in tuple(self._files):
            self._close(path)

    def finish(self, verify: Callable[[Path], None] | None = None) -> None:
        """Check that every byte was written, write the index, wait for the disk, and give the directory its name.

        verify: called with the temporary directory when all is written; its errors are passed on.
        CheckpointError: parts of tensors were never written, the disk failed, or something took the final name.
        After an error everything stays under the temporary name.
        """
        assert not self.finished and not self.joins, "finished already, or for another process to finish"
        for path in tuple(self._files):
            self._close(path)
        if missing := [problem for name in self._tensors for problem in self._missing(name)]:
            raise self._error(*missing)
        if len(self._left) > 1:
            path = self.incomplete / INDEX
            total = sum(info.num_bytes for info in self._tensors.values())
            weight_map = {info.name: info.file.name for info in self._tensors.values()}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            with self.directory.disk_errors(path):
                path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        if verify is not None:
            verify(self.incomplete)
        self.directory.complete()
        self.finished = True

    def abort(self) -> None:
        """Stop; what was written stays under the temporary name."""
        for path in tuple(self._files):
            with suppress(CheckpointError):  # whatever stopped the writing is what the user needs to hear
                self._close(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None:
            self.abort()
        elif not self.finished:
            self.finish()

    def _check(self, name: str, region: TensorSlice, tensor: Tensor) -> None:
        assert not self.finished, "finished already"
        info = self._tensors.get(name)
        if info is None:
            raise self._error(f"tensor {name} was not planned. Its name must be in the list given first")
        actual = f"dtype {tensor.dtype}, shape {tuple(tensor.shape)} at {region.start}"
        if tensor.dtype != info.dtype or tuple(tensor.shape) != region.shape or not region.fits(info.shape):
            expected = f"dtype {info.dtype} and part of shape {info.shape}"
            raise self._error(
                f"{info.file.name}: tensor {name}: expected {expected}, found {actual}. Plan what is written"
            )
        if any(region.overlaps(other) for other in self._written[name]):
            raise self._error(f"{info.file.name}: tensor {name}: {actual} was written before. Write every part once")

    def _missing(self, name: str) -> Iterator[str]:
        # The regions do not overlap, so the count of elements decides.
        info = self._tensors[name]
        total = prod(info.shape)
        written = sum(prod(region.shape) for region in self._written[name])
        if written != total:
            difference = f"{written} of {total} elements were written"
            yield f"{info.file.name}: tensor {name}: {difference}. The source lacks it; nothing has the final name"

    def _put(self, info: TensorInfo, region: TensorSlice, tensor: Tensor) -> None:
        """Write contiguous CPU ``tensor`` to ``region``, with one call per contiguous run in the file."""
        if 0 in region.shape:
            return
        if info.file not in self._files:
            self._files[info.file] = os.open(info.file, os.O_WRONLY)
        file = self._files[info.file]
        strides = row_major_strides(info.shape)
        itemsize = info.dtype.itemsize
        memory = tensor_bytes(tensor)
        begin = info.begin + offset_of(region.start, strides) * itemsize
        outer = next(dim for dim in range(len(region.shape) + 1) if is_one_run(region.shape[dim:], strides[dim:]))
        run = prod(region.shape[outer:]) * itemsize
        offsets = [begin]
        for size, stride in zip(region.shape[:outer], strides, strict=False):
            offsets = [offset + index * stride * itemsize for offset in offsets for index in range(size)]
        for place, offset in enumerate(offsets):
            _write_run(file, memory[place * run : (place + 1) * run], offset)

    def _close(self, path: Path) -> None:
        if path in self._files:
            with self.directory.disk_errors(path):
                os.close(self._files.pop(path))

    def _error(self, *problems: str) -> CheckpointError:
        return CheckpointError(str(self.directory.path), problems)


def _write_run(file: int, memory: memoryview, begin: int) -> None:
    done = os.pwrite(file, memory, begin)
    while done < len(memory):  # the kernel writes at most 2 GiB a call
        done += os.pwrite(file, memory[done:], begin + done)
