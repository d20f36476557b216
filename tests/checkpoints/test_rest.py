"""Multimodal checkpoints there and back: what is not trained keeps its bytes, and the files their spelling.

What is compared with is the source, read by the safetensors package, and the model that transformers makes of what
was written.
"""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from mcore_rl.checkpoints.convert import HF, open_hf, to_hf, to_megatron
from mcore_rl.checkpoints.export import save_hf
from mcore_rl.checkpoints.hf_sidecar_files import copy_sidecar_files
from mcore_rl.checkpoints.load import load_hf
from mcore_rl.checkpoints.manifest import write_manifest
from mcore_rl.checkpoints.published import open_weights
from mcore_rl.checkpoints.rank_state import SIDECAR_FILES
from mcore_rl.checkpoints.rest import KEPT, keep_rest, rest_of
from mcore_rl.config.parallel import parse_layout
from mcore_rl.config.role import Head
from mcore_rl.controller.lifecycle.model_checks import demand_weights
from mcore_rl.families.config_json import read_config
from mcore_rl.families.registry import model_of
from mcore_rl.ground.errors import CheckpointError
from mcore_rl.parallel.launch import Rank
from mcore_rl.weights.table import Table
from tests.support import engines, picture_models, rank_files, text_parts
from tests.support.checkpoints import edit_config, tensors
from tests.support.engines import same_bits
from tests.support.forked import run_ranks
from tests.support.text_parts import PUBLISHED

QWEN3, MOE, GEMMA = (f"{name}ForConditionalGeneration" for name in ("Qwen3VL", "Qwen3VLMoe", "Gemma3"))
KIMI = "KimiK25ForConditionalGeneration"
CASES = [(name, spelling, None) for name, spellings in PUBLISHED.items() for spelling in spellings]
CASES += [(MOE, "newest", experts) for experts in ("module", "alone")]


def _quiet(stage: str, num_bytes: int, total: int) -> None: ...


def assert_same_tensors(one: Path, other: Path) -> None:
    """Names, dtypes and bits."""
    ours, theirs = tensors(one), tensors(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize(("architecture", "spelling", "experts"), CASES)
@pytest.mark.parametrize("files", [1, 3])
def test_to_megatron_and_back_when_the_source_is_gone(
    architecture: str, spelling: str, experts: str | None, files: int, tmp_path: Path
) -> None:
    source, kept = tmp_path / "hf", tmp_path / "kept"
    model = text_parts.write(architecture, source, spelling, experts, files=files, dtype=torch.bfloat16)
    shutil.copytree(source, kept)
    to_megatron(source, tmp_path / "megatron", report=_quiet)
    shutil.rmtree(source)
    to_hf(tmp_path / "megatron", tmp_path / "out", report=_quiet)
    assert_same_tensors(tmp_path / "out", kept)
    ours, theirs = read_config(tmp_path / "out"), read_config(kept)
    assert ours == theirs
    assert (tmp_path / "out" / "preprocessor_config.json").read_bytes() == (
        kept / "preprocessor_config.json"
    ).read_bytes()
    assert not (tmp_path / "out" / KEPT).exists()
    if architecture == KIMI or (experts == "alone"):
        return  # transformers 5.19 does not read these names: docs/models.md
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", dtype=torch.float32)
    for name, tensor in model.state_dict().items():
        expected = tensor if "language_model" not in name and "lm_head" not in name else tensor.bfloat16().float()
        assert torch.equal(loaded.state_dict()[name], expected), name


def _saved(rank: Rank, root: Path, layout: str, *, pictures: bool = False) -> None:
    parallel, directory = parse_layout(layout), root / "hf"
    table = Table(*model_of(read_config(directory), pictures=pictures), parallel, rank.world_size)
    with (
        engines.world(rank),
        engines.groups_of(layout) as groups,
        open_weights(directory, pictures=pictures) as checkpoint,
    ):
        load = partial(load_hf, checkpoint=checkpoint, table=table, rank=groups.rank)
        engine = engines.build(groups, table.model, layout=layout, trainable=False, load=load)
        save_hf(engine.models, table, rank.rank, root / "out", directory, max_shard_bytes=100_000)


@pytest.mark.tier("test")
@pytest.mark.parametrize(
    ("architecture", "layout", "experts"),
    [(GEMMA, "tp=2", None), (QWEN3, "pp=2", None), (MOE, "etp=2", None), (MOE, "ep=2", "module"), (KIMI, "tp=2", None)],
)
def test_processes_write_the_whole_together(
    architecture: str, layout: str, experts: str | None, tmp_path: Path, processes: None
) -> None:
    text_parts.write(architecture, tmp_path / "hf", None, experts)
    run_ranks(_saved, 2, (tmp_path, layout))
    assert_same_tensors(tmp_path / "out", tmp_path / "hf")


@pytest.mark.tier("test")
@pytest.mark.parametrize(
    ("family", "layout", "spelling", "experts"),
    [
        ("qwen2_5_vl", "tp=2", "flat", None),
        ("qwen2_5_vl", "pp=2", "newest", None),
        ("qwen3_vl", "tp=2", None, None),
        ("qwen3_vl_moe", "ep=2", None, "published"),
        ("qwen3_vl_moe", "tp=2,etp=2", None, "module"),
    ],
)
def test_a_tower_that_is_a_part_of_the_model_comes_back_bit_for_bit(
    family: str, layout: str, spelling: str | None, experts: str | None, tmp_path: Path, processes: None
) -> None:
    """It is read into the modules of the first stage, and written from them, as the files were spelt."""
    architecture = picture_models.ARCHITECTURES[family]
    text_parts.write(architecture, tmp_path / "hf", spelling, experts)
    run_ranks(partial(_saved, pictures=True), 2, (tmp_path, layout))
    assert_same_tensors(tmp_path / "out", tmp_path / "hf")
    assert read_config(tmp_path / "out") == read_config(tmp_path / "hf")


@pytest.mark.parametrize("head", [Head.lm, Head.value])
@pytest.mark.parametrize(
    ("family", "layout", "world_size", "spelling", "experts"),
    [
        ("qwen2_5_vl", "tp=2,pp=2", 4, "flat", None),
        ("qwen3_vl", "pp=2", 2, None, None),
        ("qwen3_vl_moe", "ep=2", 2, None, "published"),
        ("qwen3_vl_moe", "tp=2", 2, None, "module"),
    ],
)
def test_a_checkpoint_of_a_run_that_saw_pictures_becomes_the_whole_when_the_source_is_gone(
    family: str, layout: str, world_size: int, spelling: str | None, experts: str | None, head: Head, tmp_path: Path
) -> None:
    """A critic's too, which has a value head in the place of the output projection, and may begin another run."""
    source, kept, step, out = (tmp_path / name for name in ("hf", "kept", "step_7", "out"))
    text_parts.write(picture_models.ARCHITECTURES[family], source, spelling, experts)
    checkpoint, whole = open_hf(source, pictures=True)
    table = Table(whole.family, whole.model, parse_layout(layout), world_size, head=head)
    weights = {name: checkpoint.read(name) for name in table.hf_tensors if name in checkpoint.tensors}
    weights |= {name: torch.rand(info.shape) for name, info in table.hf_tensors.items() if name not in weights}
    rank_files.write_shards(step / "actor", table, weights)
    beside = step / "actor" / SIDECAR_FILES
    beside.mkdir()
    copy_sidecar_files(source, beside, torch.float32, head=head, pictures=True)
    keep_rest(source, beside, tower=False)
    write_manifest(step, {})
    source.rename(kept)

    to_hf(step, out, report=_quiet)
    config = read_config(kept)
    if head is Head.lm:
        assert_same_tensors(out, kept)
        assert read_config(out) == config
        return
    assert read_config(out) == config | {"num_labels": 1}
    demand_weights(out, Head.value, pictures=True)
    theirs = {name: tensor for name, tensor in tensors(kept).items() if not name.endswith("lm_head.weight")}
    theirs["score.weight"] = weights["score.weight"]
    assert same_bits(tensors(out), theirs)


def test_what_is_kept_beside_a_checkpoint_says_how_the_files_were(tmp_path: Path) -> None:
    text_parts.write(MOE, tmp_path / "hf")
    (tmp_path / "beside").mkdir()
    copy_sidecar_files(tmp_path / "hf", tmp_path / "beside", torch.float32)
    keep_rest(tmp_path / "hf", tmp_path / "beside")
    source, beside = rest_of(tmp_path / "hf"), rest_of(tmp_path / "beside")
    assert source is not None and beside is not None
    assert (source.spelling, source.experts, set(source.tensors)) == (
        beside.spelling,
        beside.experts,
        set(beside.tensors),
    )
    assert {name: tensor for name, tensor in tensors(tmp_path / "hf").items() if "visual" in name}.keys() == set(
        beside.tensors
    )
    beside.demand_same(tmp_path / "hf")
    held = load_file(tmp_path / "beside" / KEPT)
    changed = next(iter(held))
    held[changed].view(-1)[0] += 1
    said = {"format": "pt", "spelling": source.spelling.model, "experts": source.experts}
    save_file(held, tmp_path / "beside" / KEPT, said)
    with pytest.raises(CheckpointError, match=changed):
        source.demand_same(tmp_path / "beside")
    save_file(held, tmp_path / "beside" / KEPT, {"format": "pt"})
    with pytest.raises(CheckpointError, match="does not say how"):
        rest_of(tmp_path / "beside")


def test_a_critic_that_reads_text_is_of_the_text_model_alone(tmp_path: Path) -> None:
    text_parts.write(GEMMA, tmp_path / "hf")
    (tmp_path / "critic").mkdir()
    copy_sidecar_files(tmp_path / "hf", tmp_path / "critic", torch.float32, head=Head.value)
    config = read_config(tmp_path / "critic")
    assert config["architectures"] == ["Gemma3ForSequenceClassification"] and config["model_type"] == "gemma3_text"
    assert "vision_config" not in config and rest_of(tmp_path / "critic") is None


def _without_tower(held: dict[str, torch.Tensor]) -> None:
    for name in [name for name in held if "visual" in name]:
        del held[name]


def _quantised_tower(held: dict[str, torch.Tensor]) -> None:
    held["model.visual.blocks.0.attn.qkv.weight_scale_inv"] = torch.ones(1)


def _unknown(held: dict[str, torch.Tensor]) -> None:
    held["model.audio.weight"] = torch.ones(1)


def _of_another_shape(held: dict[str, torch.Tensor]) -> None:
    name = "model.language_model.layers.1.mlp.experts.down_proj"
    held[name] = held[name][:, :-1].contiguous()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_without_tower, r"has no tensor model.visual.\*"),
        (_quantised_tower, "scales of a part that is not trained"),
        (_unknown, "model.audio.weight of shape"),
        (_of_another_shape, "expected shape"),
    ],
)
def test_files_that_are_not_whole_are_refused(change: Any, said: str, tmp_path: Path) -> None:
    text_parts.write(MOE, tmp_path / "hf", files=1)
    held = load_file(tmp_path / "hf" / "model.safetensors")
    change(held)
    save_file(held, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=said):
        open_hf(tmp_path / "hf")


def test_experts_that_are_square_one_way_are_told_apart_by_the_other(tmp_path: Path) -> None:
    """Where one matrix of an expert is as high as wide, the other is not, and says which way round both are."""
    for experts in ("published", "module"):
        for number, width in enumerate((32, 64)):  # of gate and up, or of down, beside a hidden size of 64
            directory = tmp_path / f"{experts}{number}"
            model = text_parts.build(MOE, hidden_size=64, moe_intermediate_size=width)
            held = text_parts.stored(model, MOE, "newest", experts)
            directory.mkdir()
            save_file(held, directory / "model.safetensors", {"format": "pt"})
            (directory / "config.json").write_text(
                json.dumps(text_parts.config(MOE, hidden_size=64, moe_intermediate_size=width))
            )
            checkpoint, _ = open_hf(directory)
            experts_of = model.state_dict()["model.language_model.layers.1.mlp.experts.gate_up_proj"]
            read = checkpoint.read("model.layers.1.mlp.experts.1.up_proj.weight")
            assert torch.equal(read, experts_of[1, width:]), (experts, width)


def test_the_export_has_no_prediction_layers_and_no_quantisation_within_the_text(tmp_path: Path) -> None:
    text_parts.write(KIMI, tmp_path / "hf")
    text = read_config(tmp_path / "hf")["text_config"] | {"num_nextn_predict_layers": 1, "quantization_config": {}}
    edit_config(tmp_path / "hf", text_config=text, quantization_config={})
    (tmp_path / "out").mkdir()
    copy_sidecar_files(tmp_path / "hf", tmp_path / "out", torch.bfloat16)
    written = read_config(tmp_path / "out")
    assert written["text_config"]["num_nextn_predict_layers"] == 0 and "num_nextn_predict_layers" not in written
    assert "quantization_config" not in written and "quantization_config" not in written["text_config"]
    assert written["dtype"] == written["text_config"]["dtype"] == "bfloat16"
    assert HF == "hf"
