"""Stacks of experts, read and written in every form that checkpoints have, against slices of whole tensors by hand."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mcore_rl.checkpoints import stacked
from mcore_rl.checkpoints.convert import open_hf, open_megatron, to_megatron
from mcore_rl.checkpoints.hf_directory import HfCheckpoint
from mcore_rl.checkpoints.load import check_checkpoint
from mcore_rl.checkpoints.published import open_weights
from mcore_rl.checkpoints.safetensors import TensorSpec
from mcore_rl.checkpoints.stacked import StackedWriter, UnstackedCheckpoint, stored_tensors, unstacked
from mcore_rl.families.registry import FAMILIES
from mcore_rl.ground.errors import CheckpointError
from mcore_rl.weights.table import Table
from mcore_rl.weights.tensor_slice import TensorSlice
from tests.support import checkpoints
from tests.support.checkpoints import edit_config

TABLE = checkpoints.table("gpt_oss")
GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"
GATE = "model.layers.1.mlp.experts.5.gate_proj.weight"

# in_turns, transposed -> the gate and the other half of a slab.
Halves = Callable[[Tensor], tuple[Tensor, Tensor]]
FORMS: dict[tuple[bool, bool], Halves] = {
    (True, True): lambda slab: (slab[:, 0::2].T, slab[:, 1::2].T),  # gpt_oss
    (False, True): lambda slab: (slab[:, : slab.shape[1] // 2].T, slab[:, slab.shape[1] // 2 :].T),
    (True, False): lambda slab: (slab[0::2], slab[1::2]),
    (False, False): lambda slab: (slab[: slab.shape[0] // 2], slab[slab.shape[0] // 2 :]),
}


def table_of(in_turns: bool, transposed: bool) -> Table:
    """gpt_oss with its first stack, of gate and up, in another form."""
    family = FAMILIES["gpt_oss"]
    first = replace(family.stacks[0], in_turns=in_turns, transposed=transposed)
    return Table(replace(family, stacks=(first, *family.stacks[1:])), checkpoints.MODELS["gpt_oss"])


def tensors_of(table: Table) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(info.shape, generator=generator) for name, info in stored_tensors(table).items()}


def write(directory: Path, tensors: dict[str, Tensor]) -> HfCheckpoint:
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return HfCheckpoint.open(directory)


def some_region(shape: tuple[int, ...], rng: random.Random) -> TensorSlice:
    spans = [sorted(rng.sample(range(size + 1), 2)) for size in shape]
    return TensorSlice(tuple(begin for begin, _ in spans), tuple(end - begin for begin, end in spans))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("window", [None, 700, 100])  # of bytes; a row of a slab has 192 or 512
def test_regions_of_an_expert_are_those_of_the_stack(
    form: tuple[bool, bool], window: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if window is not None:
        monkeypatch.setattr(stacked, "WINDOW_BYTES", window)
    table, rng = table_of(*form), random.Random(1)
    tensors = tensors_of(table)
    with write(tmp_path, tensors) as files:
        checkpoint = unstacked(files, table)
        check_checkpoint(checkpoint, table)
        for expert in (0, 5):
            halves = FORMS[form](tensors[GATE_UP][expert])
            for half, name in zip(halves, ("gate", "up"), strict=True):
                full = f"model.layers.1.mlp.experts.{expert}.{name}_proj.weight"
                assert torch.equal(checkpoint.read(full), half)
                for _ in range(5):
                    region = some_region(tuple(half.shape), rng)
                    out = torch.full((*region.shape, 2), 7.0)[..., 0]  # with gaps, as a shard's rows may have
                    checkpoint.read_into(full, region, out)
                    (r, c), (h, w) = region
                    assert torch.equal(out, half[r : r + h, c : c + w])


def test_vectors_and_single_matrices_of_gpt_oss(tmp_path: Path) -> None:
    tensors, prefix = tensors_of(TABLE), "model.layers.2.mlp.experts."
    with write(tmp_path, tensors) as files:
        checkpoint = unstacked(files, TABLE)
        bias = tensors[f"{prefix}gate_up_proj_bias"][3]
        assert torch.equal(checkpoint.read(f"{prefix}3.gate_proj.bias"), bias[0::2])
        assert torch.equal(checkpoint.read(f"{prefix}3.up_proj.bias"), bias[1::2])
        assert torch.equal(checkpoint.read(f"{prefix}3.down_proj.weight"), tensors[f"{prefix}down_proj"][3].T)
        assert torch.equal(checkpoint.read(f"{prefix}3.down_proj.bias"), tensors[f"{prefix}down_proj_bias"][3])
        assert checkpoint.tensors.keys() == TABLE.hf_tensors.keys()
        assert checkpoint.stored.keys() == tensors.keys()
        assert {name: info.shape for name, info in checkpoint.tensors.items()} == {
            name: info.shape for name, info in TABLE.hf_tensors.items()
        }


def test_a_family_without_stacks_is_left_alone(tmp_path: Path) -> None:
    checkpoints.write("llama", tmp_path)
    with HfCheckpoint.open(tmp_path) as files:
        assert unstacked(files, checkpoints.table("llama")) is files
    assert stored_tensors(checkpoints.table("llama")) == checkpoints.table("llama").hf_tensors


@pytest.mark.parametrize("form", FORMS)
def test_what_is_written_part_by_part_is_the_stack(form: tuple[bool, bool], tmp_path: Path) -> None:
    table = table_of(*form)
    tensors = tensors_of(table)
    with write(tmp_path / "source", tensors) as files:
        source = unstacked(files, table)
        specs = [TensorSpec(name, torch.float32, info.shape) for name, info in table.hf_tensors.items()]
        with StackedWriter(tmp_path / "out", specs, table, table.family.stacks, max_shard_bytes=50_000) as writer:
            for spec in specs:  # each in two parts, the second first
                whole, middle = source.read(spec.name), spec.shape[0] // 2
                for begin, end in ((middle, spec.shape[0]), (0, middle)):
                    start = (begin, *(0 for _ in spec.shape[1:]))
                    writer.write_slice(spec.name, TensorSlice(start, tuple(whole[begin:end].shape)), whole[begin:end])
            assert not writer._slabs, "a complete slab is not kept"
    written = checkpoints.tensors(tmp_path / "out")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in tensors.items())


def test_a_slab_that_lacks_a_part_does_not_get_the_name(tmp_path: Path) -> None:
    with write(tmp_path / "source", tensors_of(TABLE)) as files:
        source = unstacked(files, TABLE)
        specs = [TensorSpec(name, torch.float32, info.shape) for name, info in TABLE.hf_tensors.items()]
        writer = StackedWriter(tmp_path / "out", specs, TABLE, TABLE.family.stacks)
        for spec in specs:
            if spec.name != GATE:
                writer.write(spec.name, source.read(spec.name))
        missing = 48 * 128
        with pytest.raises(CheckpointError, match=rf"{GATE_UP}: {7 * missing} of {8 * missing} elements were written"):
            writer.finish()
        assert not (tmp_path / "out").exists()
        writer.write(GATE, source.read(GATE))
        with pytest.raises(AssertionError, match="was written twice"):
            writer.write(GATE, source.read(GATE))


def test_every_wrong_stack_is_named_as_it_is_in_the_files(tmp_path: Path) -> None:
    tensors = tensors_of(TABLE)
    tensors[GATE_UP] = tensors[GATE_UP].transpose(1, 2).contiguous()
    del tensors["model.layers.0.mlp.experts.down_proj_bias"]
    blocks = "model.layers.3.mlp.experts.down_proj_packed"
    tensors[blocks] = torch.zeros(8, 48, 2, 16, dtype=torch.uint8)
    with write(tmp_path, tensors) as files:
        for checkpoint in (files, unstacked(files, TABLE)):
            with pytest.raises(CheckpointError) as raised:
                check_checkpoint(checkpoint, TABLE)
            message = str(raised.value)
            assert len(raised.value.problems) == 3
            assert f"tensor {GATE_UP}: expected shape (8, 48, 128) by config.json and found (8, 128, 48)" in message
            assert "tensor model.layers.0.mlp.experts.down_proj_bias of shape (8, 48) is missing" in message
            assert f"tensor {blocks} of shape (8, 48, 2, 16) has no place" in message


def test_a_saved_config_of_another_model_is_noticed(tmp_path: Path) -> None:
    checkpoints.write("gpt_oss", tmp_path)
    edit_config(tmp_path, num_local_experts=4)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["num_local_experts"] == 4
    model = replace(checkpoints.MODELS["gpt_oss"], moe=replace(checkpoints.MODELS["gpt_oss"].moe, num_experts=4))
    with HfCheckpoint.open(tmp_path) as files, pytest.raises(CheckpointError, match=r"\(4, 48, 128\).*\(8, 48, 128\)"):
        check_checkpoint(files, Table(FAMILIES["gpt_oss"], model))


def test_closing_closes_the_files(tmp_path: Path) -> None:
    files = write(tmp_path, tensors_of(TABLE))
    with unstacked(files, TABLE) as checkpoint:
        assert isinstance(checkpoint, UnstackedCheckpoint)
        checkpoint.read(GATE)
        assert files._files
    assert not files._files


FUSED = [name for name in checkpoints.WITH_EXPERTS if name != "gpt_oss"]


def write_module(name: str, published: Path, fused: Path) -> None:
    """The same model twice: as ``save_pretrained`` writes it, and the state dict of the module of transformers 5."""
    state = checkpoints.write(name, published).state_dict()
    fused.mkdir()
    save_file({key: tensor.contiguous() for key, tensor in state.items()}, fused / "model.safetensors")
    shutil.copy(published / "config.json", fused)


@pytest.mark.parametrize("name", FUSED)
def test_the_state_of_the_module_is_read_as_what_save_pretrained_writes(name: str, tmp_path: Path) -> None:
    write_module(name, tmp_path / "published", tmp_path / "fused")
    with open_weights(tmp_path / "fused") as files:
        assert any(key.endswith(".experts.gate_up_proj") for key in files.stored), "nothing is tested"
    fused, table = open_hf(tmp_path / "fused")
    published = checkpoints.tensors(tmp_path / "published")
    with fused:
        check_checkpoint(fused, table)
        assert fused.tensors.keys() == published.keys()
        assert all(torch.equal(fused.read(key), tensor) for key, tensor in published.items())


def test_the_state_of_a_module_is_converted(tmp_path: Path) -> None:
    write_module("mixtral", tmp_path / "published", tmp_path / "fused")
    converted = to_megatron(tmp_path / "fused", tmp_path / "out", report=lambda *_: None)
    assert converted.num_tensors == len(checkpoints.tensors(tmp_path / "fused"))
    to_megatron(tmp_path / "published", tmp_path / "other", report=lambda *_: None)
    one, other = (open_megatron(tmp_path / name) for name in ("out", "other"))
    assert one.tensors == other.tensors
    for name, spec in one.tensors.items():
        parts = [torch.empty(spec.shape, dtype=spec.dtype) for _ in range(2)]
        for source, part in zip((one, other), parts, strict=True):
            source.read_into(name, TensorSlice.whole(spec.shape), part)
        assert torch.equal(*parts)


def test_a_fused_stack_that_is_missing_is_named_as_the_module_has_it(tmp_path: Path) -> None:
    write_module("mixtral", tmp_path / "published", tmp_path / "fused")
    held = checkpoints.tensors(tmp_path / "fused")
    lost = "model.layers.1.mlp.experts.down_proj"
    del held[lost]
    save_file(held, tmp_path / "fused" / "model.safetensors")
    with pytest.raises(CheckpointError) as raised:
        open_hf(tmp_path / "fused")
    (problem,) = raised.value.problems
    assert f"tensor {lost} of shape" in problem
