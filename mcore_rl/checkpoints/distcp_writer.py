"""Writing a torch distributed checkpoint as megatron-core's ``torch_dist`` loader expects it, from one process.

The files are those of torch's own ``FileSystemWriter`` (torch/distributed/checkpoint/filesystem.py, 2.13): chunks made
by ``torch.save``, one after another, and ``.metadata``; and ``common.pt`` and ``metadata.json``, which megatron-core
adds (megatron/core/dist_checkpointing/strategies/common.py and core.py, 0.16.1).  Only one chunk is in memory at a
time, where both of those writers take the whole state dict.
"""

from __future__ import annotations

import json
import pickle
from math import prod
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

from mcore_rl.checkpoints.distcp import METADATA
from mcore_rl.checkpoints.new_directory import NewDirectory
from mcore_rl.weights.tensor_slice import TensorSlice

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
            dict(self._tensors), planner_data={}, storage_data=self._places, storage_meta=StorageMeta(),
            version=CURRENT_DCP_VERSION,
        )  # fmt: skip
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
