"""Quantised checkpoints as their makers publish them: what is read, and what is refused in one line.

The oracles are torch's own conversion of fp8 and transformers' own dequantisation of mxfp4 (test_mxfp4.py).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mcore_rl.checkpoints.convert import dequantise
from mcore_rl.checkpoints.load import load_hf
from mcore_rl.checkpoints.published import open_weights
from mcore_rl.config.role import Head
from mcore_rl.controller.lifecycle.model_checks import demand_weights
from mcore_rl.families.registry import model_of
from mcore_rl.ground.errors import CheckpointError
from mcore_rl.weights.table import Table
from tests.checkpoints.test_load import _module_of
from tests.support import checkpoints, picture_models, tiny_models
from tests.support.fp8_blocks import write_in_fp8


def in_fp8(directory: Path, name: str, scales: torch.dtype) -> dict[str, Tensor]:
    """Writes the tiny model ``name`` with its projections in fp8; gives the numbers they stand for, in float32."""
    tiny_models.save(name, directory, torch.bfloat16)
    return write_in_fp8(directory, scales)


@pytest.mark.parametrize(
    ("name", "scales"),
    [("deepseek_v3", torch.float32), ("qwen3", torch.bfloat16), ("qwen3_moe", torch.bfloat16)],
)
def test_a_run_reads_fp8_in_blocks(name: str, scales: torch.dtype, tmp_path: Path) -> None:
    plain = in_fp8(tmp_path / "fp8", name, scales)
    demand_weights(tmp_path / "fp8", Head.lm)
    dequantise(tmp_path / "fp8", tmp_path / "plain", report=lambda what, done, total: None)
    written = checkpoints.tensors(tmp_path / "plain")
    assert all(torch.equal(written[key], plain[key].bfloat16()) for key in written)
    table = Table(*model_of(json.loads((tmp_path / "fp8" / "config.json").read_text())))
    assert written.keys() == table.hf_tensors.keys() & plain.keys()
    modules = [_module_of(table).bfloat16(), _module_of(table).bfloat16()]
    for module, directory in zip(modules, ("fp8", "plain"), strict=True):
        with open_weights(tmp_path / directory) as checkpoint:
            load_hf([module], checkpoint, table, 0)
    for one, other in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
        assert torch.equal(one, other)


PROJECTION = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("added", "said"),
    [
        ({f"{PROJECTION}.qweight": torch.zeros(2, 2, dtype=torch.int32)}, "GPTQ or AWQ"),
        ({f"{PROJECTION}.weight_packed": torch.zeros(2, 2, dtype=torch.int32)}, "compressed-tensors"),
        ({f"{PROJECTION}.weight_scale": torch.ones(1)}, "ModelOpt"),
        ({f"{PROJECTION}.weight.absmax": torch.ones(1)}, "bitsandbytes"),
        ({f"{PROJECTION}.weight": torch.zeros(2, 2).to(torch.float8_e4m3fn)}, "without the scales"),
        (
            {
                f"{PROJECTION}.weight": torch.zeros(2, 2).to(torch.float8_e4m3fn),
                f"{PROJECTION}.weight_scale_inv": torch.ones(1, 1),
            },
            "fp8 in blocks, and config.json does not say so",
        ),
        (
            {f"{PROJECTION}_blocks": torch.zeros(1, 1, 1, 16).byte(), f"{PROJECTION}_scales": torch.zeros(1, 1, 1)},
            "mxfp4, and config.json does not say so",
        ),
    ],
)
def test_what_config_json_does_not_say_is_refused_in_one_line(
    added: dict[str, Tensor], said: str, tmp_path: Path
) -> None:
    tiny_models.save("llama", tmp_path, torch.bfloat16)
    save_file(checkpoints.tensors(tmp_path) | added, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as raised:
        demand_weights(tmp_path, Head.lm)
    assert len(raised.value.problems) == 1 and said in raised.value.problems[0]


def test_modelopts_file_is_named(tmp_path: Path) -> None:
    tiny_models.save("llama", tmp_path, torch.bfloat16)
    (tmp_path / "hf_quant_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json: ModelOpt quantised"):
        open_weights(tmp_path)


def test_pixels_that_are_normalised_otherwise_are_refused(tmp_path: Path) -> None:
    picture_models.write("qwen3_vl", tmp_path / "model")
    processor = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    (tmp_path / "model" / "preprocessor_config.json").write_text(json.dumps(processor))
    open_weights(tmp_path / "model", pictures=True)
    (tmp_path / "model" / "preprocessor_config.json").write_text(json.dumps(processor | {"image_std": [0.2, 0.5, 0.5]}))
    open_weights(tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"image_std is \[0.2, 0.5, 0.5\], and pixels"):
        open_weights(tmp_path / "model", pictures=True)
