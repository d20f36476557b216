"""A run's checkpoint becomes a Hugging Face one, bit for bit, from any layout, in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mcore_rl.checkpoints.convert import open_run, role_directory, to_hf
from mcore_rl.checkpoints.manifest import MANIFEST
from mcore_rl.checkpoints.rank_state import SIDECAR_FILES, state_file
from mcore_rl.ground.errors import CheckpointError
from tests.support import checkpoints, rank_files
from tests.support.engines import same_bits

CASES = [("qwen2", "tp=2", 4), ("mixtral", "tp=2,ep=2", 4), ("deepseek_v3", "pp=2,ep=2", 4)]


def _quiet(stage: str, num_bytes: int, total: int) -> None: ...


@pytest.fixture
def step(tmp_path: Path) -> Path:
    checkpoints.write("mixtral", tmp_path / "hf")
    rank_files.write_run(tmp_path / "step_7", "mixtral", tmp_path / "hf", "ep=2", 2)
    return tmp_path / "step_7"


@pytest.mark.parametrize(("family", "layout", "world_size"), CASES)
def test_to_hf_gives_the_weights_back(tmp_path: Path, family: str, layout: str, world_size: int) -> None:
    checkpoints.write(family, tmp_path / "hf")
    rank_files.write_run(tmp_path / "step_7", family, tmp_path / "hf", layout, world_size)
    done = to_hf(tmp_path / "step_7", tmp_path / "out", report=_quiet)
    expected = checkpoints.tensors(tmp_path / "hf")
    assert same_bits(checkpoints.tensors(tmp_path / "out"), expected)
    assert done.num_tensors == len(expected) and done.family == family
    assert (tmp_path / "out" / "tokenizer.json").exists()


def test_the_dtype_is_that_of_training_unless_another_is_asked_for(tmp_path: Path) -> None:
    checkpoints.write("mixtral", tmp_path / "hf")
    rank_files.write_run(tmp_path / "step_7", "mixtral", tmp_path / "hf", "tp=2", 2, dtype="bfloat16")
    to_hf(tmp_path / "step_7" / "actor", tmp_path / "live", report=_quiet)
    to_hf(tmp_path / "step_7" / "actor", tmp_path / "main", dtype=torch.float32, report=_quiet)
    expected = checkpoints.tensors(tmp_path / "hf")
    assert same_bits(checkpoints.tensors(tmp_path / "main"), expected)
    assert same_bits(checkpoints.tensors(tmp_path / "live"), {key: each.bfloat16() for key, each in expected.items()})


def test_what_must_be_float32_stays_that(tmp_path: Path) -> None:
    checkpoints.write("deepseek_v3", tmp_path / "hf")
    rank_files.write_run(tmp_path / "step_7", "deepseek_v3", tmp_path / "hf", "ep=2", 2, dtype="bfloat16")
    to_hf(tmp_path / "step_7", tmp_path / "out", report=_quiet)
    written = checkpoints.tensors(tmp_path / "out")
    biases = {name for name in written if name.endswith("e_score_correction_bias")}
    assert biases and {name for name, tensor in written.items() if tensor.dtype is torch.float32} == biases


def test_what_was_damaged_is_refused(step: Path, tmp_path: Path) -> None:
    path = state_file(step / "actor", 1)
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"actor/rank_00001.safetensors has other bytes than were written"):
        to_hf(step, tmp_path / "out", report=_quiet)
    assert not (tmp_path / "out").exists()


def test_what_was_never_finished_is_refused(step: Path, tmp_path: Path) -> None:
    (step / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=r"there is no manifest.json beside the directory"):
        to_hf(step, tmp_path / "out", report=_quiet)


def test_another_model_is_refused(step: Path, tmp_path: Path) -> None:
    checkpoints.write("mixtral", tmp_path / "other")
    checkpoints.edit_config(tmp_path / "other", num_hidden_layers=5)
    with pytest.raises(CheckpointError, match=r"num_layers: 4 in its own hf/config.json, 5 in the one given"):
        open_run(step, tmp_path / "other")
    (step / "actor" / SIDECAR_FILES / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"model.layers.4.* is in no file"):
        open_run(step, tmp_path / "other")


def test_a_run_is_told_from_others_by_its_files(step: Path, tmp_path: Path) -> None:
    assert role_directory(step) == role_directory(step / "actor") == step / "actor"
    assert role_directory(tmp_path / "hf") is None
    assert open_run(tmp_path / "hf") is None
