"""Quantised matrices against dequantising the whole matrix by hand, in float64."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mcore_rl.checkpoints.block_fp8 import FLOAT32_OF_BYTE, QUANTISED, BlockFp8Checkpoint
from mcore_rl.checkpoints.hf_directory import HfCheckpoint
from mcore_rl.ground.errors import CheckpointError
from mcore_rl.weights.tensor_slice import TensorSlice

BLOCK = (4, 6)
SHAPES = [(8, 12), (9, 13), (3, 5), (1, 30), (17, 1), (0, 5)]


def scales_of(shape: tuple[int, int]) -> Tensor:
    rows, columns = (-(-size // block) for size, block in zip(shape, BLOCK, strict=True))
    return torch.rand(rows, columns) + 0.01


def by_hand(weight: Tensor, scales: Tensor) -> Tensor:
    """Each element times the scale of its block.  In float64 the product is exact; float32 rounds it once."""
    rows, columns = torch.meshgrid(*(torch.arange(size) for size in weight.shape), indexing="ij")
    return (weight.double() * scales.double()[rows // BLOCK[0], columns // BLOCK[1]]).float()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    directory, tensors = tmp_path_factory.mktemp("fp8"), {"norm": torch.randn(7).bfloat16()}
    for index, shape in enumerate(SHAPES):
        tensors[f"w{index}"] = (torch.randn(shape) * 50).to(QUANTISED)
        tensors[f"w{index}_scale_inv"] = scales_of(shape)
    save_file(tensors, directory / "model.safetensors")
    return directory, tensors


def test_boxes_that_begin_and_end_anywhere_are_dequantised(saved: tuple[Path, dict[str, Tensor]]) -> None:
    directory, tensors = saved
    checkpoint, rng = BlockFp8Checkpoint(HfCheckpoint.open(directory), BLOCK), random.Random(0)
    for index, shape in enumerate(SHAPES):
        expected = by_hand(tensors[f"w{index}"], tensors[f"w{index}_scale_inv"])
        assert torch.equal(checkpoint.read(f"w{index}"), expected)
        for _ in range(60):
            start = tuple(rng.randint(0, size) for size in shape)
            sizes = tuple(rng.randint(0, size - begin) for size, begin in zip(shape, start, strict=True))
            part = expected[start[0] : start[0] + sizes[0], start[1] : start[1] + sizes[1]]
            for out in (torch.zeros(sizes), torch.zeros(sizes, dtype=torch.bfloat16), torch.zeros(sizes[::-1]).t()):
                checkpoint.read_into(f"w{index}", TensorSlice(start, sizes), out)
                assert torch.equal(out, part.to(out.dtype)), (shape, start, sizes)


def test_scales_are_consumed_and_other_tensors_read_as_they_are(saved: tuple[Path, dict[str, Tensor]]) -> None:
    directory, tensors = saved
    with BlockFp8Checkpoint(HfCheckpoint.open(directory), BLOCK) as checkpoint:
        assert checkpoint.tensors.keys() == {"norm", *(f"w{index}" for index in range(len(SHAPES)))}
        assert torch.equal(checkpoint.read("norm"), tensors["norm"])


def test_the_table_is_every_number_of_the_format() -> None:
    converted = torch.arange(256, dtype=torch.uint8).view(QUANTISED).to(torch.float64)
    assert torch.equal(FLOAT32_OF_BYTE.double().nan_to_num(-1), converted.nan_to_num(-1))
    assert FLOAT32_OF_BYTE.isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]
    assert FLOAT32_OF_BYTE[0x7E] == 448 and FLOAT32_OF_BYTE[0x01] == 2**-9 and FLOAT32_OF_BYTE[0xB8] == -1


def test_everything_wrong_with_scales_is_said_at_once(tmp_path: Path) -> None:
    weight = torch.ones(8, 12).to(QUANTISED)
    tensors = {
        "bare": weight.clone(),
        "cube": torch.ones(2, 2, 2).to(QUANTISED),
        "small": weight.clone(),
        "small_scale_inv": torch.ones(1, 2),
        "half": weight.clone(),
        "half_scale_inv": torch.ones(2, 2).half(),
        "lost_scale_inv": torch.ones(2, 2),
        "wide": torch.ones(8, 12),
        "wide_scale_inv": torch.ones(2, 2),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        BlockFp8Checkpoint(HfCheckpoint.open(tmp_path), BLOCK)
    said = {problem.split(" ")[2]: problem for problem in caught.value.problems}
    assert said.keys() == {"bare", "cube", "small", "half", "lost_scale_inv", "wide_scale_inv"}
    assert "shape (2, 2) for blocks of (4, 6); bare_scale_inv is not there" in said["bare"]
    assert "only matrices have blocks" in said["cube"]
    assert "found torch.float32 and (1, 2)" in said["small"] and "found torch.float16" in said["half"]
    assert "lost is not there" in said["lost_scale_inv"] and "wide is of dtype torch.float32" in said["wide_scale_inv"]
