from __future__ import annotations

import shutil
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mcore_rl.checkpoints.contents import inspect
from mcore_rl.checkpoints.convert import HF, to_megatron
from mcore_rl.ground.errors import CheckpointError
from tests.support import checkpoints


@pytest.mark.parametrize("name", ["mixtral", "qwen2", "deepseek_v3"])
def test_both_kinds_are_described_alike(name: str, tmp_path: Path) -> None:
    checkpoints.write(name, tmp_path / "hf", torch.bfloat16)
    to_megatron(tmp_path / "hf", tmp_path / "megatron", report=lambda *_: None)
    held, model = checkpoints.tensors(tmp_path / "hf"), checkpoints.MODELS[name]
    dtypes: dict[str, int] = {}
    for tensor in held.values():
        key = str(tensor.dtype).removeprefix("torch.")
        dtypes[key] = dtypes.get(key, 0) + tensor.nbytes
    shutil.copytree(tmp_path / "megatron", tmp_path / "bare")
    shutil.rmtree(tmp_path / "bare" / HF)
    for directory, family in (("hf", name), ("megatron", name), ("bare", "unknown")):
        contents = inspect(tmp_path / directory)
        assert contents.kind == ("hugging face" if directory == "hf" else "megatron")
        assert (contents.family, contents.num_layers) == (family, model.num_layers)
        assert contents.num_experts == (model.moe.num_experts if model.moe else 0)
        assert contents.num_parameters == sum(prod(tensor.shape) for tensor in held.values())
        assert contents.dtypes == dtypes
        assert contents.num_bytes == sum(dtypes.values())
        assert contents.num_others == 0
    assert inspect(tmp_path / "bare", tmp_path / "hf").family == name
    assert inspect(tmp_path / "hf").num_tensors == len(held)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a directory"):
        inspect(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read"):
        inspect(tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_stacked_layers_and_experts_are_counted_without_a_config(tmp_path: Path) -> None:
    weights = {
        "embedding.word_embeddings.weight": torch.zeros(5, 2),
        "decoder.layers.mlp.experts.experts.linear_fc1.weight": torch.zeros(3, 4, 6, 2),
        "optimizer.state.exp_avg.decoder.layers.mlp.experts.experts.linear_fc1.weight": torch.zeros(3),
    }
    dcp.save(dict(weights) | {"iteration": 1}, checkpoint_id=tmp_path / "saved", no_dist=True)
    contents = inspect(tmp_path / "saved")
    assert (contents.num_layers, contents.num_experts, contents.num_parameters) == (3, 4, 5 * 2 + 3 * 4 * 6 * 2)
    assert (contents.num_tensors, contents.num_others) == (2, 2)
    assert "homogeneous" in contents.notes[0]
