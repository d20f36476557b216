"""Tensors held otherwise than the files say are found, whoever holds them and however they are cut."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mcore_rl.checkpoints.hf_directory import HfCheckpoint
from mcore_rl.checkpoints.load import load_hf
from mcore_rl.proofs.differences import module_differences, piece_differences, region_differences, worst
from mcore_rl.weights.table import Piece
from tests.support import checkpoints


@pytest.fixture
def checkpoint(tmp_path: Path) -> HfCheckpoint:
    save_file(
        {"a": torch.arange(24.0).view(4, 6) / 7, "b": torch.arange(6.0).view(1, 6)}, tmp_path / "model.safetensors"
    )
    return HfCheckpoint.open(tmp_path)


def held() -> tuple[torch.Tensor, list[Piece]]:
    """Rows 2 and 3 of a, then b, then padding."""
    tensor = torch.cat([torch.arange(12.0, 24.0).view(2, 6) / 7, torch.arange(6.0).view(1, 6), torch.full((1, 6), 9.0)])
    return tensor, [Piece("a", (2, 0), (0, 0), (2, 6)), Piece("b", (0, 0), (2, 0), (1, 6))]


def test_what_is_the_same_is_not_found(checkpoint: HfCheckpoint) -> None:
    tensor, pieces = held()
    assert piece_differences(tensor, pieces, checkpoint) == {}
    assert piece_differences(tensor.bfloat16(), pieces, checkpoint) == {}, "files are cast as weights are when loaded"
    assert piece_differences(tensor, [*pieces, Piece("c", (0,), (0,), (1,))], checkpoint) == {}, "files may lack it"


def test_each_tensor_with_its_largest_difference(checkpoint: HfCheckpoint) -> None:
    tensor, pieces = held()
    tensor[1, 3] += 0.5
    tensor[0, 0] -= 2.0
    assert piece_differences(tensor, pieces, checkpoint) == {"a": 2.0}
    tensor[2, 5] = math.nan
    assert piece_differences(tensor, pieces, checkpoint) == {"a": 2.0, "b": math.inf}
    tensor[3] = 7.0
    assert piece_differences(tensor, pieces[:0], checkpoint) == {}, "padding is of no tensor"


def test_of_several_the_largest() -> None:
    assert worst([{"a": 1.0, "b": 3.0}, {}, {"a": 2.0, "b": 1.0}]) == {"a": 2.0, "b": 3.0}


@pytest.mark.parametrize("name", ["qwen2", "mixtral"])
def test_every_parameter_is_looked_at(name: str, tmp_path: Path) -> None:
    """One element of each is changed in turn; tied embeddings and biases among them."""
    checkpoints.write(name, tmp_path)
    table = checkpoints.table(name)
    model = torch.nn.Module()
    for local in table.tensors(0):
        at, (*path, last) = model, local.name.split(".")
        for part in path:
            if part not in at._modules:
                at.add_module(part, torch.nn.Module())
            at = at._modules[part]
        at.register_parameter(last, torch.nn.Parameter(torch.empty(table.shape(local))))
    with HfCheckpoint.open(tmp_path) as files:
        load_hf([model], files, table, 0)
        assert module_differences([model], table, 0, files) == {}
        names = set()
        for parameter in model.parameters():
            kept = parameter.detach().clone()
            parameter.data.view(-1)[0] += 1.0
            (changed,) = module_differences([model], table, 0, files).items()
            assert changed[1] == pytest.approx(1.0, rel=1e-6)
            names.add(changed[0])
            parameter.data.copy_(kept)
    assert len(names) == len(list(model.parameters()))


def test_two_local_tensors_are_compared_piece_by_piece() -> None:
    tensor, pieces = held()
    other = tensor.clone()
    other[3] = 0.0  # padding
    assert region_differences(tensor, other, pieces) == {}
    other[1, 5] += 0.5
    assert region_differences(tensor, other, pieces) == {"a": pytest.approx(0.5)}
    other[2, 0] = math.nan
    assert region_differences(tensor, other, pieces)["b"] == math.inf
