"""Regions of merged tensors: any window of the sum is that part of it."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from mcore_rl.checkpoints.convert import MergedWeights, open_hf
from mcore_rl.weights.tensor_slice import TensorSlice
from tests.support import tiny_models
from tests.support.adapters import PEFT

DOWN = "model.layers.0.mlp.down_proj.weight"


def test_a_window_is_that_part_of_the_sum(tmp_path: Path) -> None:
    tiny_models.save("qwen2", tmp_path)
    base = load_file(tmp_path / "model.safetensors")
    rows, columns = base[DOWN].shape
    random = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, columns, generator=random), torch.randn(rows, 2, generator=random)
    stem = f"{PEFT}{DOWN.removesuffix('.weight')}"
    merged = MergedWeights(*open_hf(tmp_path), {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}, 0.5)
    whole = base[DOWN].double() + 0.5 * (b.double() @ a.double())
    out = torch.empty(4, 5, dtype=torch.bfloat16)
    merged.read_into(DOWN, TensorSlice((3, 7), (4, 5)), out)
    assert torch.equal(out, whole[3:7, 7:12].float().bfloat16()), "rounded once"
    other = "model.layers.1.mlp.down_proj.weight"
    plain = torch.empty(2, columns)
    merged.read_into(other, TensorSlice((1, 0), (2, columns)), plain)
    assert torch.equal(plain, base[other][1:3])
    merged.close()
