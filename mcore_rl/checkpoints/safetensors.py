"""The safetensors file format: which tensors a file holds and where, and reading a region of one of them.

A file is eight bytes of header length, a JSON header, and the tensors one after another; see the format section of
https://huggingface.co/docs/safetensors.  The header is read here, not by the safetensors package, because loading needs
byte offsets: a rank reads the ranges that it needs straight into its parameters.  ``hf_directory`` decides which files
make a checkpoint; ``sharded_writer`` writes them.

Invariant: reading takes at most ``WINDOW_BYTES`` of host memory beside the destination.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import FileIO
from itertools import pairwise
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from mcore_rl.ground.errors import CheckpointError
from mcore_rl.ground.json_text import read_json
from mcore_rl.weights.tensor_slice import TensorSlice, is_one_run, offset_of, row_major_strides, span_of, windows
from mcore_rl.weights.views import view_of

# At most so much of a file or tensor in memory at a time, unless it is read or written in place.
WINDOW_BYTES = 32 << 20
MAX_HEADER_BYTES = 100_000_000  # as the safetensors package
METADATA = "__metadata__"

# The format's names of the dtypes that torch has too.
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and shape of a tensor in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class TensorInfo(TensorSpec):
    """A tensor and where it is: bytes ``begin`` to ``end`` (exclusive) of ``file``, row-major, little-endian."""

    file: Path
    begin: int
    end: int


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU ``tensor`` of any dtype, without a copy."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu", "only contiguous host memory is one range of bytes"
    # Not through numpy: torch refuses to resize a storage that numpy saw, and offloading resizes it.
    memory = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
    memory.__dict__["tensor"] = tensor  # alive as long as the view
    return memoryview(memory).cast("B")


def in_groups(specs: Iterable[TensorSpec], most_bytes: int) -> list[list[TensorSpec]]:
    """``specs`` in their order, a new group where one would exceed ``most_bytes``; a larger tensor has its own."""
    groups: list[list[TensorSpec]] = [[]]
    used = 0
    for spec in specs:
        if groups[-1] and used + spec.num_bytes > most_bytes:
            groups.append([])
            used = 0
        groups[-1].append(spec)
        used += spec.num_bytes
    return groups


def windows_of(spec: TensorSpec) -> Iterator[TensorSlice]:
    """``spec`` in parts of at most ``WINDOW_BYTES``, in the order of its bytes."""
    limit = WINDOW_BYTES // spec.dtype.itemsize
    return windows(TensorSlice.whole(spec.shape), row_major_strides(spec.shape), limit)


def assert_part(name: str, shape: Sequence[int], region: TensorSlice, out: Tensor) -> None:
    """Assert that ``region`` lies within tensor ``name`` of ``shape``, and that ``out`` has the region's shape."""
    assert region.fits(shape), f"{region} is no part of {name} of shape {shape}"
    assert tuple(out.shape) == region.shape, f"{name}: out has shape {tuple(out.shape)}, the region {region.shape}"


def read_header(path: Path) -> tuple[dict[str, TensorInfo], list[str]]:
    """(the tensors of file ``path`` in the order of its bytes, every problem that makes it unusable)."""
    again = "Download it again"
    try:
        with path.open("rb") as file:
            file_size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            if prefix == b"version ":
                return {}, [f"{path.name}: is a Git LFS pointer, not the file itself. Run git lfs pull where it is"]
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or (length <= MAX_HEADER_BYTES and file_size < 8 + length):
                expected = 8 + (length if len(prefix) == 8 else 2)
                problem = f"truncated: the header alone takes {expected} bytes and the file has {file_size}"
                return {}, [f"{path.name}: {problem}. {again}"]
            if length > MAX_HEADER_BYTES:
                return {}, [f"{path.name}: is not a safetensors file: a header of {length} bytes. {again}"]
            header = read_json(file.read(length), object_pairs_hook=_Pairs)
    except OSError as error:
        return {}, [f"{path.name}: cannot be read: {error.strerror}. Check that it exists and may be read"]
    except ValueError as error:
        return {}, [f"{path.name}: its header is not JSON ({error}). {again}"]
    if not isinstance(header, _Pairs):
        return {}, [f"{path.name}: its header is no JSON object. {again}"]
    tensors, problems = _entries(path, header, 8 + length)
    problems += _layout_problems(list(tensors.values()), 8 + length, file_size) if not problems else []
    return tensors, [f"{path.name}: {problem}. {again}" for problem in problems]


def read_metadata(path: Path) -> dict[str, str]:
    """``__metadata__`` of the header of ``path``, a file that ``read_header`` found sound."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        metadata: dict[str, str] = json.loads(file.read(length)).get(METADATA, {})
    return metadata


class _Pairs(list[tuple[str, Any]]):
    """A JSON object as pairs, so that a name that occurs twice shows."""


def _entries(path: Path, header: _Pairs, data_begin: int) -> tuple[dict[str, TensorInfo], list[str]]:
    tensors: dict[str, TensorInfo] = {}
    problems = []
    for name, value in header:
        if name == METADATA:
            continue
        entry: dict[str, Any] = dict(value) if isinstance(value, _Pairs) else {}
        shape: Any = entry.get("shape")
        offsets: Any = entry.get("data_offsets")
        if name in tensors:
            problems.append(f"tensor {name} stands in it twice")
        elif not (_are_counts(shape) and _are_counts(offsets) and len(offsets) == 2):
            problems.append(f"tensor {name} has no valid shape and data_offsets in the header")
        elif entry.get("dtype") not in DTYPES:
            known = ", ".join(DTYPES)
            problems.append(f"tensor {name} has the unknown dtype {entry.get('dtype')}; known are {known}")
        else:
            begin, end = offsets
            info = TensorInfo(name, DTYPES[entry["dtype"]], tuple(shape), path, data_begin + begin, data_begin + end)
            if end - begin != info.num_bytes:
                size = f"{info.num_bytes} bytes, its data_offsets {end - begin}"
                problems.append(f"tensor {name} of dtype {entry['dtype']} and shape {shape} takes {size}")
            tensors[name] = info
    return dict(sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end))), problems


def _are_counts(value: object) -> bool:
    return isinstance(value, list) and all(type(count) is int and count >= 0 for count in value)


def _layout_problems(tensors: Sequence[TensorInfo], data_begin: int, file_size: int) -> list[str]:
    """Gaps, overlaps and a wrong end; ``tensors`` in the order of their bytes."""
    problems = []
    if tensors and tensors[0].begin != data_begin:
        problems.append(f"there is a gap before tensor {tensors[0].name}, the first")
    for before, after in pairwise(tensors):
        if before.end != after.begin:
            what = "a gap" if before.end < after.begin else "an overlap"
            problems.append(f"there is {what} between tensors {before.name} and {after.name}")
    expected = tensors[-1].end if tensors else data_begin
    if expected != file_size:
        what = "truncated" if file_size < expected else "too long"
        problems.append(f"{what}: expected {expected} bytes, found {file_size}")
    return problems


def read_slice(file: int, info: TensorInfo, region: TensorSlice, out: Tensor) -> None:
    """Copy ``region`` of the tensor ``info`` from the open descriptor ``file`` to ``out``, of the region's shape.

    A region without gaps in the file goes straight into contiguous host memory of its dtype.  Anything else (columns, a
    destination with strides, on a device or of another dtype: cast as ``Tensor.copy_``) is copied out of a mapping of
    at most ``WINDOW_BYTES``, which touches only the pages that hold the region.  Measured from page cache into new
    memory, both reach the speed of reading the same bytes at once; a ``pread`` for each row of 2 KiB reaches half of
    it, and whole rows for an eighth of their columns a third.  Whole files are never mapped: their pages would count
    as resident, and mappings read network file systems page by page.

    CheckpointError: the file changed since its header was read, or the disk failed.
    """
    assert_part(info.name, info.shape, region, out)
    if 0 in region.shape:
        return
    strides = row_major_strides(info.shape)
    try:
        if is_one_run(region.shape, strides) and _is_plain(out, info.dtype):
            _read_run(file, info.begin + offset_of(region.start, strides) * info.dtype.itemsize, tensor_bytes(out))
            return
        if os.fstat(file).st_size < info.end:  # or touching the mapping would end the process
            raise EOFError
        for window in windows(region, strides, WINDOW_BYTES // info.dtype.itemsize):
            view_of(out, window.within(region)).copy_(_map_window(file, info, window, strides))
    except (EOFError, OSError) as error:
        problem = "ends too early" if isinstance(error, EOFError) else f"cannot be read: {error.strerror}"
        remedy = "It changed or its disk failed while it was read: download it again"
        message = f"{info.file.name}: {problem}, at tensor {info.name}, bytes {info.begin} to {info.end}. {remedy}"
        raise CheckpointError(str(info.file.parent), [message]) from error


def read_whole(info: TensorInfo) -> Tensor:
    """All of ``info`` as a new CPU tensor.  Opens the file each time: for small tensors."""
    out = torch.empty(info.shape, dtype=info.dtype)
    with info.file.open("rb") as file:
        read_slice(file.fileno(), info, TensorSlice.whole(info.shape), out)
    return out


def _is_plain(out: Tensor, dtype: torch.dtype) -> bool:
    return out.device.type == "cpu" and out.dtype == dtype and out.is_contiguous()


def _read_run(file: int, begin: int, memory: memoryview) -> None:
    done = 0
    while done < len(memory):
        count = os.preadv(file, [memory[done:]], begin + done)  # the kernel reads at most 2 GiB a call
        if count == 0:
            raise EOFError
        done += count


def _map_window(file: int, info: TensorInfo, window: TensorSlice, strides: Sequence[int]) -> Tensor:
    """The elements of ``window`` in the page cache; unmapped when the tensor goes."""
    span = span_of(window.shape, strides)
    begin = info.begin + offset_of(window.start, strides) * info.dtype.itemsize
    skip = begin % mmap.ALLOCATIONGRANULARITY
    # Private and writable, because torch warns of read-only memory; nothing is ever written.
    mapping = mmap.mmap(file, skip + span * info.dtype.itemsize, access=mmap.ACCESS_COPY, offset=begin - skip)
    return torch.frombuffer(mapping, dtype=info.dtype, count=span, offset=skip).as_strided(window.shape, strides)


def encode_header(
    specs: Sequence[TensorSpec], path: Path, metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, TensorInfo]]:
    """(header bytes of a file that holds ``specs``, name -> its place in the file, in the order of the bytes).

    Wide dtypes come first and the data begins at a multiple of eight, so that every tensor is aligned to its dtype, as
    in the safetensors package.
    """
    begin = 0
    entries = dict[str, Any]()
    tensors = dict[str, TensorInfo]()
    for spec in sorted(specs, key=lambda spec: -spec.dtype.itemsize):
        end = begin + spec.num_bytes
        entries[spec.name] = {
            "dtype": DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [begin, end],
        }
        tensors[spec.name] = TensorInfo(spec.name, spec.dtype, tuple(spec.shape), path, begin, end)
        begin = end
    text = json.dumps({METADATA: dict(metadata), **entries}, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    size = 8 + len(text)
    placed = {name: replace(info, begin=info.begin + size, end=info.end + size) for name, info in tensors.items()}
    return len(text).to_bytes(8, "little") + text, placed


class OpenFiles:
    """The open files of ``directory``.  Leaving a ``with`` closes them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[Path, FileIO] = {}

    def descriptor(self, path: Path) -> int:
        """The file descriptor of ``path``, opened on first use.  CheckpointError: it cannot be opened."""
        if path not in self._files:
            try:
                self._files[path] = FileIO(path)
            except OSError as error:
                problem = (
                    f"{path.name}: cannot be opened: {error.strerror}. It was there when the checkpoint was opened"
                )
                raise CheckpointError(str(self.directory), [problem]) from error
        return self._files[path].fileno()

    def close(self) -> None:
        """Close the files; reading opens them again."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
