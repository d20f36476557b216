"""The files of a torch distributed checkpoint (DCP), megatron-core's ``torch_dist``: reading regions, and writing.

``.metadata`` is a pickle that lists the dtype, shape and chunks of every tensor, and the file and bytes of every chunk;
the bytes are what ``torch.save`` writes of the chunk, a zip archive with the elements uncompressed in one record
(torch/distributed/checkpoint/metadata.py and filesystem.py, 2.13).  So a region of a tensor is read like a region of
safetensors: from its bytes, straight into the destination.  Torch's own reader would load every touched chunk whole.

Pickles can run code.  Here they cannot: the unpickler finds only the classes that such a file needs, and puts an empty
stand-in for everything of Megatron's own.

``DistcpWriter`` writes what megatron-core's loader expects, from one process: the files are those of torch's own
``FileSystemWriter``, and ``common.pt`` and ``metadata.json``, which megatron-core adds
(megatron/core/dist_checkpointing/strategies/common.py and core.py, 0.16.1).  One chunk is in memory at a time, where
both of those writers take the whole state dict.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from math import prod
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from mcore_rl.checkpoints.new_directory import NewDirectory
from mcore_rl.checkpoints.safetensors import WINDOW_BYTES, OpenFiles, TensorInfo, TensorSpec, assert_part, read_slice
from mcore_rl.ground.errors import CheckpointError
from mcore_rl.weights.tensor_slice import TensorSlice, row_major_strides
from mcore_rl.weights.views import view_of

METADATA = ".metadata"
_LOCAL_HEADER_BYTES = 30  # of a zip record, before its name and extra field
_AGAIN = "Copy the checkpoint again, or save it again"


@dataclass(frozen=True)
class DcpChunk:
    """A region of a stored tensor, and the bytes of ``file`` that hold its archive."""

    region: TensorSlice
    file: Path
    begin: int
    length: int


@dataclass(frozen=True)
class DcpTensor(TensorSpec):
    """A tensor of the checkpoint under its key, and its chunks, which cover it."""

    chunks: tuple[DcpChunk, ...]


class DistributedCheckpoint(OpenFiles):
    """The tensors of an opened directory, read region by region.  Closing, or leaving a ``with``, closes files."""

    def __init__(self, directory: Path, tensors: dict[str, DcpTensor], others: tuple[str, ...]) -> None:
        super().__init__(directory)
        self.tensors = tensors
        self.others = others
        self._records: dict[DcpChunk, _Record] = {}
        self._chunk_index: dict[str, tuple[int, dict[tuple[int, ...], list[DcpChunk]]]] = {}

    @classmethod
    def open(cls, directory: Path | str) -> DistributedCheckpoint:
        """The checkpoint in ``directory``; ``others`` are the keys that hold no tensor.

        Raises CheckpointError with every violation: no such checkpoint, unreadable metadata, chunks that do not cover
        their tensor, a file that is missing or ends too early.
        """
        directory = Path(directory)
        metadata = _read_metadata(directory)
        tensors = {}
        others = []
        problems = []
        ends: dict[Path, int] = defaultdict(int)
        for key, stored in metadata.state_dict_metadata.items():
            if not isinstance(stored, TensorStorageMetadata):
                others.append(key)
                continue
            tensor, tensor_problems = _stored_tensor(directory, key, stored, metadata.storage_data)
            tensors[key] = tensor
            problems += tensor_problems
            for chunk in tensor.chunks:
                ends[chunk.file] = max(ends[chunk.file], chunk.begin + chunk.length)
        for path, end in sorted(ends.items()):
            if not path.is_file():
                problems.append(f"{path.name}: is missing; {METADATA} says that it holds {end} bytes. {_AGAIN}")
            elif path.stat().st_size < end:
                size = f"expected {end} bytes, found {path.stat().st_size}"
                problems.append(f"{path.name}: truncated: {size}. {_AGAIN}")
        if problems:
            raise CheckpointError(str(directory), problems)
        return cls(directory, tensors, tuple(others))

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file that holds a tensor."""
        return tuple(sorted({chunk.file for tensor in self.tensors.values() for chunk in tensor.chunks}))

    def read_into(self, key: str, region: TensorSlice, out: Tensor) -> None:
        """Copy ``region`` of tensor ``key`` into ``out``, of the region's shape, any strides, device and dtype (cast).

        CheckpointError: a chunk is not what the metadata says, or cannot be read.
        """
        tensor = self.tensors[key]
        assert_part(key, tensor.shape, region, out)
        if 0 in region.shape:
            return
        for chunk in self._chunks_of(tensor, region):
            both = region.shared(chunk.region)
            assert both is not None, "chunks that do not overlap are not asked for"
            self._read_part(tensor, chunk, both.within(chunk.region), view_of(out, both.within(region)))

    def damage(self, key: str) -> Iterator[str]:
        """The damaged chunks of tensor ``key``, by the CRC-32 that ``torch.save`` stored with each chunk."""
        for chunk in self.tensors[key].chunks:
            record = self._record(self.tensors[key], chunk)
            file = self.descriptor(chunk.file)
            value = 0
            for begin in range(record.begin, record.end, WINDOW_BYTES):
                value = zlib.crc32(os.pread(file, min(WINDOW_BYTES, record.end - begin), begin), value)
            if value != record.crc:
                difference = f"expected crc32:{record.crc:08x}, found crc32:{value:08x}"
                yield f"{chunk.file.name}: {key} at {chunk.region.start} is damaged: {difference}. {_AGAIN}"

    def _chunks_of(self, tensor: DcpTensor, region: TensorSlice) -> Iterator[DcpChunk]:
        """The chunks that overlap ``region``, looked up by the leading dimensions in which chunks have length 1."""
        if tensor.name not in self._chunk_index:
            sizes = zip(*(chunk.region.shape for chunk in tensor.chunks), strict=True)
            depth = len(list(takewhile(lambda sizes: set(sizes) == {1}, sizes)))
            by_lead: dict[tuple[int, ...], list[DcpChunk]] = defaultdict(list)
            for chunk in tensor.chunks:
                by_lead[chunk.region.start[:depth]].append(chunk)
            self._chunk_index[tensor.name] = depth, by_lead
        depth, by_lead = self._chunk_index[tensor.name]
        one = all(size == 1 for size in region.shape[:depth])
        near = by_lead[region.start[:depth]] if one else tensor.chunks
        yield from (chunk for chunk in near if chunk.region.overlaps(region))

    def _read_part(self, tensor: DcpTensor, chunk: DcpChunk, part: TensorSlice, out: Tensor) -> None:
        record = self._record(tensor, chunk)
        file = self.descriptor(chunk.file)
        if record.strides == row_major_strides(chunk.region.shape):
            info = TensorInfo(tensor.name, tensor.dtype, chunk.region.shape, chunk.file, record.begin, record.end)
            read_slice(file, info, part, out)
        else:  # torch.save keeps strides; nothing that Megatron saves is known to have others, but it may
            archive = io.BytesIO(os.pread(file, chunk.length, chunk.begin))
            out.copy_(view_of(torch.load(archive, map_location="cpu", weights_only=True), part))

    def _record(self, tensor: DcpTensor, chunk: DcpChunk) -> _Record:
        if chunk not in self._records:
            try:
                record = _find_record(self.descriptor(chunk.file), chunk)
            except (OSError, ValueError, KeyError, zipfile.BadZipFile, pickle.UnpicklingError, EOFError) as error:
                problem = f"{chunk.file.name}: holds no tensor at bytes {chunk.begin} to {chunk.begin + chunk.length}"
                problem += f", where {tensor.name} should be ({error}). {_AGAIN}"
                raise CheckpointError(str(self.directory), [problem]) from error
            size = prod(chunk.region.shape) * tensor.dtype.itemsize
            if record.dtype != tensor.dtype or record.shape != chunk.region.shape or record.end - record.begin < size:
                expected = f"{tensor.dtype} {chunk.region.shape}"
                problem = f"{chunk.file.name}: {tensor.name} at {chunk.region.start}: expected {expected}, found"
                problem += f" {record.dtype} {record.shape} in {record.end - record.begin} bytes. {_AGAIN}"
                raise CheckpointError(str(self.directory), [problem])
            self._records[chunk] = record
        return self._records[chunk]


def _stored_tensor(
    directory: Path, key: str, stored: TensorStorageMetadata, places: dict[MetadataIndex, Any]
) -> tuple[DcpTensor, list[str]]:
    shape = tuple(stored.size)
    chunks = dict[tuple[int, ...], DcpChunk]()
    missing = []
    for described in stored.chunks:
        region = TensorSlice(tuple(described.offsets), tuple(described.sizes))
        place = places.get(MetadataIndex(key, described.offsets))
        if place is None:
            missing.append(region)
        else:  # replicas of a chunk are one chunk
            chunks[region.start] = DcpChunk(region, directory / place.relative_path, place.offset, place.length)
    held = sum(prod(chunk.region.shape) for chunk in chunks.values())
    problems = []
    if missing or held != prod(shape) or not all(chunk.region.fits(shape) for chunk in chunks.values()):
        problem = f"{METADATA}: the chunks of {key} hold {held} of the {prod(shape)} elements of its shape {shape}"
        problems.append(f"{problem}. {_AGAIN}")
    return DcpTensor(key, stored.properties.dtype, shape, tuple(chunks.values())), problems


def _read_metadata(directory: Path) -> Any:
    path = directory / METADATA
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata.state_dict_metadata, dict) or not isinstance(metadata.storage_data, dict):
            raise ValueError("it describes no tensors")
    except OSError as error:
        inside = ", ".join(sorted(other.parent.name for other in directory.glob(f"*/{METADATA}")))
        remedy = (
            f"Give one of those in it: {inside}" if inside else f"Give a directory with {METADATA} and *.distcp files"
        )
        raise CheckpointError(str(directory), [f"{METADATA}: cannot be read: {error.strerror}. {remedy}"]) from error
    except Exception as error:  # a damaged pickle can raise anything
        problem = f"{METADATA}: is not the metadata of a torch distributed checkpoint ({error}). {_AGAIN}"
        raise CheckpointError(str(directory), [problem]) from error
    return metadata


class _StandIn:
    """Stands for a class that the checkpoint mentions and that reading weights does not need."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...


# The classes of DCP's metadata, (module, name): each holds data and does nothing when it is made.
METADATA_CLASSES = frozenset(
    {
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    }
    | {("torch.distributed.checkpoint.filesystem", name) for name in ("_StorageInfo", "_StoragePrefix")}
    | {
        ("torch.distributed.checkpoint.planner", name)
        for name in (
            "SavePlan",
            "TensorWriteData",
            "WriteItem",
            "WriteItemType",
        )
    }
    | {("torch", "Size"), ("torch.serialization", "_get_layout"), ("builtins", "set"), ("builtins", "slice")}
    | {("collections", "OrderedDict"), ("pathlib", "PosixPath"), ("pathlib", "Path")}
)


class _MetadataUnpickler(pickle.Unpickler):
    """Finds the classes of DCP's metadata; Megatron's become stand-ins, and everything else is refused."""

    def find_class(self, module: str, name: str) -> Any:
        """The class ``name`` of ``module``.  Raises UnpicklingError for one that such a file may not hold."""
        if module == "pathlib._local":  # Python 3.13's name for it, which others do not know
            module = "pathlib"
        if (module, name) in METADATA_CLASSES:
            return super().find_class(module, name)
        if module.partition(".")[0] == "megatron":
            return _StandIn
        if module == "torch" and isinstance(value := vars(torch).get(name), torch.dtype | torch.layout):
            return value
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


@dataclass(frozen=True)
class _Record:
    """The tensor in an archive, and the bytes of its elements: ``begin`` to ``end`` (exclusive) of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    begin: int
    end: int
    crc: int


# torch's class name of a storage -> its dtype; asking the classes themselves warns.
_STORAGES: dict[str, torch.dtype | None] = {
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "DoubleStorage": torch.float64,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "UntypedStorage": None,
}


@dataclass(frozen=True)
class _Storage:
    dtype: torch.dtype | None
    key: str


class _TensorUnpickler(pickle.Unpickler):
    """Reads the description of one tensor as (storage, offset, shape, strides, dtype), without building it."""

    def find_class(self, module: str, name: str) -> Any:
        """What ``torch.save`` names in a tensor's pickle (torch/_tensor.py, ``_reduce_ex_internal``)."""
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, offset, shape, strides, *_: (storage, offset, shape, strides, storage.dtype)
        if (module, name) == ("torch._utils", "_rebuild_tensor_v3"):
            return lambda storage, offset, shape, strides, _, hooks, dtype, *rest: (
                storage,
                offset,
                shape,
                strides,
                dtype,
            )
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return lambda tensor, *_: tensor
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and isinstance(value := vars(torch).get(name), torch.dtype):
            return value
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _STORAGES[name]
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")

    def persistent_load(self, pid: Any) -> _Storage:
        """The dtype and key of storage ``pid``: ``("storage", type, key, location, number of elements)``."""
        return _Storage(pid[1], pid[2])


def _find_record(file: int, chunk: DcpChunk) -> _Record:
    with zipfile.ZipFile(_Section(file, chunk.begin, chunk.length)) as archive:
        description = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        loaded = _TensorUnpickler(io.BytesIO(archive.read(description))).load()
        storage, offset, shape, strides, dtype = loaded
        entry = archive.getinfo(f"{description.removesuffix('data.pkl')}data/{storage.key}")
    if entry.compress_type != zipfile.ZIP_STORED:
        raise ValueError("its elements are compressed")
    header = os.pread(file, _LOCAL_HEADER_BYTES, chunk.begin + entry.header_offset)
    names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    begin = chunk.begin + entry.header_offset + _LOCAL_HEADER_BYTES + names
    if offset:
        raise ValueError("it is a part of a larger storage")
    return _Record(dtype, tuple(shape), tuple(strides), begin, begin + entry.file_size, entry.CRC)


class _Section(io.RawIOBase):
    """A byte range of an open file, as a read-only file."""

    def __init__(self, file: int, begin: int, length: int) -> None:
        super().__init__()
        self._file = file
        self._begin = begin
        self._length = length
        self._at = 0

    def seekable(self) -> bool:
        """True: ``zipfile`` seeks."""
        return True

    def readable(self) -> bool:
        """True: ``zipfile`` reads."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to ``offset`` and return the new position, from the start of the range."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        return self._at

    def tell(self) -> int:
        """The position from the start of the range."""
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill ``buffer``, at most to the end of the range; return the number of bytes."""
        wanted = max(0, min(len(buffer), self._length - self._at))
        data = os.pread(self._file, wanted, self._begin + self._at)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


FILE_BYTES = 5_000_000_000  # the writer begins a new file from this length on
ARCHIVE_BYTES = 4096  # upper bound of a chunk's archive overhead
CONTENT = {"content_metadata": {"non_homogeneous_layers": True}}


class DistcpWriter:
    """Writes chunks into ``directory.incomplete``; ``finish`` writes the metadata."""

    def __init__(self, directory: NewDirectory) -> None:
        self.directory = directory
        self._tensors: dict[str, TensorStorageMetadata] = {}
        self._places: dict[MetadataIndex, _StorageInfo] = {}
        self._file: IO[bytes] | None = None
        self._num_files = 0

    def declare(self, key: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        """Announce the tensor ``key``; every declared tensor must be written before ``finish``."""
        assert key not in self._tensors, f"{key} is declared twice"
        self._tensors[key] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), [])

    def write(self, key: str, region: TensorSlice, tensor: Tensor) -> None:
        """Write the contiguous CPU ``tensor``, which is ``region`` of the tensor declared under ``key``.

        CheckpointError: the disk is full or fails.
        """
        declared = self._tensors[key]
        assert tensor.dtype == declared.properties.dtype and region.fits(declared.size), (
            f"{key}: {region} {tensor.dtype}"
        )
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize, "torch.save writes all of it"
        with self.directory.disk_errors(self.directory.incomplete):
            file = self._open()
            begin = file.tell()
            _save(tensor.view(region.shape), file)
            place = _StorageInfo(self._name, begin, file.tell() - begin)
        offsets = torch.Size(region.start)
        index = len(declared.chunks)
        declared.chunks.append(ChunkStorageMetadata(offsets, torch.Size(region.shape)))
        self._places[MetadataIndex(key, offsets, index)] = place

    def finish(self) -> None:
        """Close the last file and write the metadata.  The directory keeps its temporary name."""
        for key, declared in self._tensors.items():
            held = sum(prod(chunk.sizes) for chunk in declared.chunks)
            assert held == prod(declared.size), f"{key}: {held} of {prod(declared.size)} elements were written"
        self.close()
        here = self.directory.incomplete
        metadata = Metadata(
            dict(self._tensors),
            planner_data={},
            storage_data=self._places,
            storage_meta=StorageMeta(),
            version=CURRENT_DCP_VERSION,
        )
        backends: dict[str, Any] = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        backends |= {"common_backend": "torch", "common_backend_version": 1}
        with self.directory.disk_errors(here / METADATA):
            (here / METADATA).write_bytes(pickle.dumps(metadata))
            torch.save(CONTENT, here / "common.pt")
            (here / "metadata.json").write_text(json.dumps(backends), encoding="utf-8")

    def close(self) -> None:
        """Close the file that is being written."""
        if self._file is not None:
            with self.directory.disk_errors(self.directory.incomplete / self._name):
                self._file.close()
            self._file = None

    @property
    def _name(self) -> str:
        return f"__0_{self._num_files - 1}.distcp"  # rank and file, as torch names them

    def _open(self) -> IO[bytes]:
        if self._file is not None and self._file.tell() >= FILE_BYTES:
            self.close()
        if self._file is None:
            self._num_files += 1
            self._file = (self.directory.incomplete / self._name).open("xb")
        return self._file


def _save(tensor: Tensor, file: IO[bytes]) -> None:
    try:
        torch.save(tensor, file)
    except RuntimeError as error:  # torch's archive writer says only that it is not where it should be
        cause = error.__context__
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__context__
        raise cause or error from None
