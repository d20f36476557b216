"""Reading torch's distributed checkpoints: the reference is torch's own writer and reader."""

from __future__ import annotations

import io
import os
import pickle
import re
from pathlib import Path, PosixPath

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mcore_rl.checkpoints import distcp
from mcore_rl.checkpoints.distcp import METADATA, DistcpWriter, DistributedCheckpoint
from mcore_rl.checkpoints.new_directory import NewDirectory
from mcore_rl.ground.errors import CheckpointError
from mcore_rl.weights.tensor_slice import TensorSlice
from mcore_rl.weights.views import view_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

TENSORS = {
    "float32": torch.randn(7, 5),
    "bfloat16": torch.randn(3, 4, 6).bfloat16(),
    "float16": torch.randn(9).half(),
    "float64": torch.randn(2, 2).double(),
    "transposed": torch.randn(6, 5).t(),
    "fp8": torch.randn(8, 8).to(torch.float8_e4m3fn),
    "scalar": torch.tensor(3.0),
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """By torch, with something that is no tensor beside."""
    dcp.save(dict(TENSORS) | {"iteration": 7}, checkpoint_id=tmp_path / "saved", no_dist=True)
    return tmp_path / "saved"


def _slices(shape: tuple[int, ...]) -> list[TensorSlice]:
    inner = TensorSlice(tuple(size // 3 for size in shape), tuple(max(1, size // 2) for size in shape))
    return [TensorSlice.whole(shape), inner]


@pytest.mark.parametrize("key", TENSORS)
def test_boxes_of_what_torch_saved(saved: Path, key: str) -> None:
    expected = TENSORS[key]
    with DistributedCheckpoint.open(saved) as checkpoint:
        assert checkpoint.tensors[key].shape == tuple(expected.shape)
        assert list(checkpoint.damage(key)) == []
        for region in _slices(tuple(expected.shape)):
            out = torch.empty(region.shape, dtype=expected.dtype)
            checkpoint.read_into(key, region, out)
            assert torch.equal(out.float(), view_of(expected, region).float())
        cast = torch.empty(expected.shape, dtype=torch.float64)
        checkpoint.read_into(key, TensorSlice.whole(expected.shape), cast)
        assert torch.equal(cast, expected.double())
        assert checkpoint.others == ("iteration",)


def _written(tmp_path: Path) -> tuple[Path, torch.Tensor]:
    """By us, in chunks that no regular grid would make."""
    whole = torch.randn(4, 10, 6)
    directory = NewDirectory(tmp_path / "out", 0)
    writer = DistcpWriter(directory)
    writer.declare("w", torch.float32, (4, 10, 6))
    for expert in range(4):
        for begin, end in ((0, 3), (3, 10)):
            for left, right in ((0, 4), (4, 6)):
                chunk = whole[expert : expert + 1, begin:end, left:right].clone()
                writer.write("w", TensorSlice((expert, begin, left), tuple(chunk.shape)), chunk)
    writer.finish()
    directory.complete()
    return tmp_path / "out", whole


def test_torch_reads_what_we_write(tmp_path: Path) -> None:
    path, whole = _written(tmp_path)
    state = {"w": torch.zeros(4, 10, 6)}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    assert torch.equal(state["w"], whole)


@pytest.mark.parametrize(
    "region",
    [
        TensorSlice((1, 2, 3), (1, 5, 2)),
        TensorSlice((0, 0, 0), (4, 10, 6)),
        TensorSlice((1, 2, 0), (3, 2, 6)),
        TensorSlice((0, 0, 0), (0, 10, 6)),
    ],
)
def test_boxes_across_chunks(tmp_path: Path, region: TensorSlice) -> None:
    path, whole = _written(tmp_path)
    with DistributedCheckpoint.open(path) as checkpoint:
        out = torch.full((*region.shape[:2], 2 * region.shape[2]), 9.0)[:, :, ::2]  # with gaps
        checkpoint.read_into("w", region, out)
        assert torch.equal(out, view_of(whole, region))


def _refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as refused:
        DistributedCheckpoint.open(path)
    return str(refused.value)


def test_a_truncated_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    path, _ = _written(tmp_path)
    file = path / "__0_0.distcp"
    size = file.stat().st_size
    os.truncate(file, size - 1)
    assert f"truncated: expected {size} bytes, found {size - 1}" in _refusal(path)
    file.unlink()
    assert re.search(r"__0_0\.distcp: is missing", _refusal(path))


def test_chunks_that_leave_something_out_are_refused(tmp_path: Path) -> None:
    path, _ = _written(tmp_path)
    metadata = pickle.loads((path / METADATA).read_bytes())
    metadata.storage_data.popitem()
    (path / METADATA).write_bytes(pickle.dumps(metadata))
    assert "the chunks of w hold 226 of the 240 elements" in _refusal(path)


def test_chunks_that_are_not_described_are_missed(tmp_path: Path) -> None:
    path, _ = _written(tmp_path)
    metadata = pickle.loads((path / METADATA).read_bytes())
    metadata.state_dict_metadata["w"].chunks.pop()
    (path / METADATA).write_bytes(pickle.dumps(metadata))
    assert "the chunks of w hold 226 of the 240 elements" in _refusal(path)


def test_files_are_no_longer_than_they_should_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distcp, "FILE_BYTES", 3000)
    path, whole = _written(tmp_path)
    with DistributedCheckpoint.open(path) as checkpoint:
        assert len(checkpoint.files) > 2
        out = torch.empty_like(whole)
        checkpoint.read_into("w", TensorSlice.whole(whole.shape), out)
    assert torch.equal(out, whole)


def test_damage_is_found_by_the_checksum_of_the_archive(tmp_path: Path) -> None:
    path, whole = _written(tmp_path)
    file = path / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    at = content.index(whole[2, 3:10, 0:4].clone().numpy().tobytes())
    content[at + 5] ^= 1
    file.write_bytes(content)
    with DistributedCheckpoint.open(path) as checkpoint:
        (problem,) = checkpoint.damage("w")
    assert re.search(r"__0_0\.distcp: w at \(2, 3, 0\) is damaged: expected crc32:\w{8}, found crc32:\w{8}", problem)


def test_an_archive_that_is_none_is_refused(tmp_path: Path) -> None:
    path, _ = _written(tmp_path)
    file = path / "__0_0.distcp"
    file.write_bytes(b"\1" * file.stat().st_size)
    with DistributedCheckpoint.open(path) as checkpoint, pytest.raises(CheckpointError, match="holds no tensor at"):
        checkpoint.read_into("w", TensorSlice((0, 0, 0), (1, 1, 1)), torch.empty(1, 1, 1))


class _Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("touch evil",)


@pytest.mark.parametrize("content", [pickle.dumps(_Evil()), b"no pickle", b"", pickle.dumps({"a": 1})])
def test_metadata_that_is_none_is_refused_and_runs_nothing(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / METADATA).write_bytes(content)
    assert "is not the metadata of a torch distributed checkpoint" in _refusal(tmp_path)
    assert not (tmp_path / "evil").exists()


def test_a_directory_without_metadata_is_refused(tmp_path: Path) -> None:
    assert "cannot be read: No such file" in _refusal(tmp_path)
    for name in ("iter_0000020", "iter_0000010"):
        (tmp_path / name).mkdir()
        (tmp_path / name / METADATA).touch()
    assert "Give one of those in it: iter_0000010, iter_0000020" in _refusal(tmp_path)


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_a_path_is_read_whichever_python_wrote_it(module: str) -> None:
    """Python 3.13 names the module of its paths ``pathlib._local``; 3.11 and 3.12 do not."""
    assert distcp._MetadataUnpickler(io.BytesIO()).find_class(module, "PosixPath") is PosixPath
    with pytest.raises(pickle.UnpicklingError):
        distcp._MetadataUnpickler(io.BytesIO()).find_class(module, "rmtree")
