"""mxfp4 against transformers' own dequantisation, bit for bit, and a published form of a whole checkpoint."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from mcore_rl.checkpoints import mxfp4
from mcore_rl.checkpoints.convert import dequantise, open_hf, to_hf, to_megatron
from mcore_rl.checkpoints.hf_directory import HfCheckpoint
from mcore_rl.checkpoints.load import check_checkpoint
from mcore_rl.checkpoints.mxfp4 import Mxfp4Checkpoint, dequantised
from mcore_rl.ground.errors import CheckpointError
from mcore_rl.weights.tensor_slice import TensorSlice
from tests.support import checkpoints, tiny_models

NAME = "model.layers.0.mlp.experts.down_proj"
QUANTISED = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def packed(experts: int, outputs: int, inputs: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(118, 126, (experts, outputs, inputs // 32), dtype=torch.uint8, generator=generator)
    return blocks, scales


def test_every_byte_and_every_scale_is_as_transformers_makes_it() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(1, 255, 1, 1)
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1).repeat(1, 1, 16)  # 255 stands for no number
    theirs = convert_moe_packed_tensors(blocks, scales).transpose(1, 2)
    ours = dequantised(blocks, scales)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    assert torch.equal(ours.view(torch.int16), theirs.contiguous().view(torch.int16))


def test_regions_are_those_of_the_whole(tmp_path: Path) -> None:
    blocks, scales = packed(3, 10, 96)
    save_file({f"{NAME}_blocks": blocks, f"{NAME}_scales": scales, "other": torch.ones(3)},
              tmp_path / "model.safetensors", {"format": "pt"})  # fmt: skip
    whole, rng = convert_moe_packed_tensors(blocks, scales), random.Random(0)
    with Mxfp4Checkpoint(HfCheckpoint.open(tmp_path)) as checkpoint:
        assert list(checkpoint.tensors) == ["other", NAME] and checkpoint.tensors[NAME].shape == (3, 96, 10)
        assert torch.equal(checkpoint.read(NAME), whole)
        for _ in range(20):
            spans = [sorted(rng.sample(range(size + 1), 2)) for size in whole.shape]
            region = TensorSlice(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))
            out = torch.empty(region.shape)
            checkpoint.read_into(NAME, region, out)
            assert torch.equal(out, whole[tuple(slice(a, b) for a, b in spans)].float())


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """gpt_oss with its experts in mxfp4, as OpenAI writes it, and its tensors as transformers dequantises them."""
    directory = tmp_path_factory.mktemp("mxfp4")
    tiny_models.save("gpt_oss", directory, torch.bfloat16)
    stored, plain = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in checkpoints.tensors(directory).items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = tensor.shape
            blocks, scales = packed(experts, outputs, inputs, seed=len(stored))
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            plain[name] = convert_moe_packed_tensors(blocks, scales)
        else:
            stored[name] = plain[name] = tensor
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    checkpoints.edit_config(directory, quantization_config=QUANTISED)
    return directory, plain


def _quiet(what: str, done: int, total: int) -> None:
    pass


def test_a_conversion_makes_the_plain_checkpoint_of_it(
    published: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    directory, plain = published
    checkpoint, table = open_hf(directory)
    with checkpoint:
        for name, tensor in checkpoints.by_table("gpt_oss", plain).items():
            assert torch.equal(checkpoint.read(name), tensor), name
    to_megatron(directory, tmp_path / "megatron", report=_quiet)
    to_hf(tmp_path / "megatron", tmp_path / "hf", report=_quiet)
    written = checkpoints.tensors(tmp_path / "hf")
    assert written.keys() == plain.keys()
    assert all(
        torch.equal(written[name], tensor) and written[name].dtype == tensor.dtype for name, tensor in plain.items()
    )
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    with HfCheckpoint.open(tmp_path / "hf") as files:
        check_checkpoint(files, table)


@pytest.mark.parametrize("way", [to_megatron, dequantise])
def test_a_slab_is_dequantised_once_to_write_and_once_to_verify(
    way: Any, published: tuple[Path, dict[str, Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, plain = published
    made = list[int]()

    def counted(blocks: Tensor, scales: Tensor) -> Tensor:
        made.append(blocks.numel() * 2)
        return dequantised(blocks, scales)

    monkeypatch.setattr(mxfp4, "dequantised", counted)
    way(directory, tmp_path / "out", report=_quiet)
    of_experts = sum(tensor.numel() for name, tensor in plain.items() if name.endswith("_up_proj"))
    of_experts += sum(tensor.numel() for name, tensor in plain.items() if name.endswith("down_proj"))
    assert sum(made) == 2 * of_experts


def test_one_pass_writes_the_plain_checkpoint(published: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    directory, plain = published
    dequantise(directory, tmp_path / "plain", report=_quiet)
    written = checkpoints.tensors(tmp_path / "plain")
    assert written.keys() == plain.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in plain.items())
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    with pytest.raises(CheckpointError, match="is not quantised"):
        dequantise(tmp_path / "plain", tmp_path / "again", report=_quiet)


def test_what_is_incomplete_or_misshapen_is_named(tmp_path: Path) -> None:
    blocks, scales = packed(3, 10, 96)
    wrong = {
        f"{NAME}_blocks": blocks,
        "a_scales": scales,
        "b_blocks": blocks.clone(),
        "b_scales": scales[:, :4].clone(),
    }
    save_file(wrong, tmp_path / "model.safetensors", {"format": "pt"})
    with HfCheckpoint.open(tmp_path) as files, pytest.raises(CheckpointError) as raised:
        Mxfp4Checkpoint(files)
    assert len(raised.value.problems) == 3
    for said in (
        f"{NAME}_blocks stands without {NAME}_scales",
        "a_scales stands without a_blocks",
        "b_blocks: expected",
    ):
        assert said in str(raised.value)
