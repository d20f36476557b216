"""What arrives on the disk is what was there when the save began, and what goes wrong is said, not raised."""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from mcore_rl.checkpoints import state_writer
from mcore_rl.checkpoints.manifest import BLOCK_BYTES, sum_of
from mcore_rl.checkpoints.state_writer import StateWriter, Written
from mcore_rl.ground.errors import CheckpointError
from tests.support.engines import CPU, same_bits


def tensors() -> dict[str, Tensor]:
    return {
        "bytes": torch.arange(7, dtype=torch.uint8),
        "half": torch.randn(33).bfloat16(),
        "wide": torch.randn(3, BLOCK_BYTES // 8 + 5),
        "long": torch.arange(5),
        "none": torch.empty(0),
    }


def wait(writer: StateWriter) -> Written:
    while (written := writer.outcome()) is None:
        pass
    return written


def read(path: Path) -> dict[str, Tensor]:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no dict


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Files are flushed only when this is set."""
    event, real = threading.Event(), os.fsync

    def fsync(file: int) -> None:
        event.wait(60)
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    yield event
    event.set()


@pytest.mark.parametrize("behind", [True, False])
def test_a_file_is_what_any_reader_of_safetensors_reads(tmp_path: Path, behind: bool) -> None:
    writer, there = StateWriter(CPU), tensors()
    writer.begin(tmp_path / "file", there, {"format": "x"}, behind=behind)
    written = wait(writer)
    assert written.problem is None and written.sum == sum_of(tmp_path / "file")
    assert same_bits(read(tmp_path / "file"), there)
    with safe_open(tmp_path / "file", "pt") as file:
        assert file.metadata() == {"format": "x"}


def test_behind_the_run_tensors_may_change_at_once(tmp_path: Path, held: threading.Event) -> None:
    writer, there = StateWriter(CPU), tensors()
    before = {name: tensor.clone() for name, tensor in there.items()}
    writer.begin(tmp_path / "one", there, {}, behind=True)
    assert writer.outcome() is None, "it returned before it was written"
    for tensor in there.values():
        tensor.zero_()
    with pytest.raises(AssertionError, match="on its way"):
        writer.begin(tmp_path / "two", there, {}, behind=True)
    held.set()
    assert wait(writer).name == "one"
    assert same_bits(read(tmp_path / "one"), before)


def test_host_memory_is_used_again(tmp_path: Path) -> None:
    writer, there = StateWriter(CPU), tensors()
    places = []
    for name in ("one", "two"):
        writer.begin(tmp_path / name, there, {}, behind=True)
        wait(writer)
        assert writer._host is not None
        places.append(writer._host.data_ptr())
        there["long"].add_(1)
    assert places[0] == places[1]
    assert same_bits(read(tmp_path / "two")["long"], there["long"] - 1)
    there["more"] = torch.ones(1000)
    writer.begin(tmp_path / "three", there, {}, behind=True)
    wait(writer)
    assert same_bits(read(tmp_path / "three"), there)


@pytest.mark.parametrize("behind", [True, False])
def test_a_disk_that_is_full_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behind: bool) -> None:
    def full(file: int, part: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = StateWriter(CPU)
    with monkeypatch.context() as patched:
        patched.setattr(state_writer.os, "write", full)
        writer.begin(tmp_path / "file", tensors(), {}, behind=behind)
        written = wait(writer)
    assert written.sum is None
    assert written.problem == f"{tmp_path / 'file'} cannot be written: No space left on device"
    writer.begin(tmp_path / "file", tensors(), {}, behind=behind)
    assert wait(writer).problem is None, "and it is tried again"


def test_a_file_that_may_not_grow_is_said(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = StateWriter(CPU)
    resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK_BYTES + 100, hard))
    try:
        writer.begin(tmp_path / "file", tensors(), {}, behind=True)
        written = wait(writer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert written.sum is None and "cannot be written: File too large" in str(written.problem)


def test_a_short_write_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    writer, there = StateWriter(CPU), tensors()
    with monkeypatch.context() as patched:
        patched.setattr(state_writer.os, "write", lambda file, part: real(file, part[: max(1, len(part) // 2)]))
        writer.begin(tmp_path / "file", there, {}, behind=True)
        assert wait(writer).sum == sum_of(tmp_path / "file")
    assert same_bits(read(tmp_path / "file"), there)


def _refuse() -> None:
    raise CheckpointError("somewhere", ["config.json cannot be read"])


def _cannot() -> None:
    raise OSError(errno.EACCES, "Permission denied", "tokenizer.json")


@pytest.mark.parametrize(
    ("beside", "said"), [(_refuse, "config.json cannot be read"), (_cannot, "tokenizer.json cannot")]
)
def test_what_is_done_beside_may_fail_too(tmp_path: Path, beside: Callable[[], None], said: str) -> None:
    writer = StateWriter(CPU)
    writer.begin(tmp_path / "file", tensors(), {}, behind=True, beside=beside)
    assert said in str(wait(writer).problem)
