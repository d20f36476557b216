"""The command line, as a user runs it: exit codes, what it says, and what an interrupt leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_rl.cli import main
from mcore_rl.ground.errors import McoreRLError
from tests.house.source import ROOT
from tests.support import checkpoints, rank_files
from tests.support.engines import same_bits

INTERRUPTED = 130
# Runs the tool, and sends itself the signal while it writes the first tensor, as Ctrl-C would.
INTERRUPT = """
import os, runpy, signal, sys
from mcore_rl.checkpoints import distcp
def write(self, *_):
    (self.directory.incomplete / "begun").touch()
    os.kill(os.getpid(), signal.SIGINT)
distcp.DistcpWriter.write = write
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints") / "hf"
    checkpoints.write("mixtral", directory)
    return directory


def _said(capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    out, errors = capsys.readouterr()
    return " ".join(out.split()), " ".join(errors.split())


def test_there_and_back_and_a_look(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    megatron, again = str(tmp_path / "megatron"), str(tmp_path / "again")
    assert main(["convert", "to-megatron", "--hf", str(hf), "--out", megatron, "--layout", "tp=2,ep=2"]) == 0
    out, errors = _said(capsys)
    assert "mixtral; verified 79 tensors, 780,864 bytes, by checksum against the source" in out
    assert "GB/s" in out
    assert "write" in errors and "verify" in errors  # the bars, away from what a script reads
    assert main(["convert", "inspect", megatron]) == 0
    out, _ = _said(capsys)
    for cell in ("kind │ megatron", "family │ mixtral", "layers │ 4", "experts per layer │ 4", "195,216", "float32"):
        assert cell in out
    assert main(["convert", "to-hf", "--megatron", megatron, "--out", again]) == 0
    assert same_bits(checkpoints.tensors(Path(again)), checkpoints.tensors(hf))


def test_a_checkpoint_of_a_run(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    rank_files.write_run(tmp_path / "step_3", "mixtral", hf, "tp=2,ep=2", 4)
    assert main(["convert", "to-hf", "--run", str(tmp_path / "step_3"), "--out", str(tmp_path / "out")]) == 0
    out, _ = _said(capsys)
    assert "mixtral; verified 79 tensors, 780,864 bytes, by checksum against the source" in out
    assert same_bits(checkpoints.tensors(tmp_path / "out"), checkpoints.tensors(hf))
    (tmp_path / "step_3" / "actor" / "rank_00002.safetensors").unlink()
    assert main(["convert", "to-hf", "--run", str(tmp_path / "step_3"), "--out", str(tmp_path / "again")]) == 2
    _, errors = _said(capsys)
    assert "rank_00002.safetensors is missing" in errors


def test_an_error_is_one_message_and_a_traceback_only_on_request(
    hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    command = ["to-megatron", "--hf", str(tmp_path), "--out", str(tmp_path / "out")]
    assert main(["convert", *command]) == 2
    _, errors = _said(capsys)
    assert errors.startswith("error: ") and "config.json: cannot be read" in errors
    with pytest.raises(McoreRLError):
        main(["convert", *command, "--debug"])
    assert main(["convert", "to-megatron", "--hf", str(hf), "--out", str(tmp_path / "out"), "--layout", "tp=x"]) == 2
    assert "Write tp=1 or more" in _said(capsys)[1]
    assert not (tmp_path / "out").exists()


def test_an_interrupt_leaves_nothing_under_the_final_name(hf: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in hf.iterdir()}
    command = [
        sys.executable,
        "-c",
        INTERRUPT,
        str(ROOT / "tools" / "convert_checkpoint.py"),
        "to-megatron",
        "--hf",
        str(hf),
        "--out",
        "out",
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == INTERRUPTED, done.stderr
    assert "Interrupted: nothing has the final name. What was written is in out.incomplete" in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["out.incomplete"]
    assert {path: path.read_bytes() for path in hf.iterdir()} == before
