"""What is read of vision towers: by transformers' own configuration classes and modules; and what is refused."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from mcore_rl.config.model_violations import model_violations
from mcore_rl.config.parallel import ParallelConfig, parse_layout
from mcore_rl.config.rollout import parse_rollout_layout, rollout_violations
from mcore_rl.families.registry import family_of, model_of
from mcore_rl.families.rules import Layers, Rule, Stage, hf
from mcore_rl.families.towers import PICTURES
from mcore_rl.ground.errors import ConfigError
from mcore_rl.parallel.layout import layout_violations
from mcore_rl.weights.table import Table
from tests.support import picture_models
from tests.support.text_parts import config as text_part_config

# vision_config of Qwen/Qwen2.5-VL-7B-Instruct and Qwen/Qwen3-VL-8B-Instruct, as published.
PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
        "in_chans": 3, "out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14,
        "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2, "temporal_patch_size": 2,
    },
    "qwen3_vl": {
        "deepstack_visual_indexes": [8, 16, 24], "depth": 27, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1152,
        "in_channels": 3, "initializer_range": 0.02, "intermediate_size": 4304, "model_type": "qwen3_vl",
        "num_heads": 16, "num_position_embeddings": 2304, "out_hidden_size": 4096, "patch_size": 16,
        "spatial_merge_size": 2, "temporal_patch_size": 2,
    },
}  # fmt: skip


def published(family: str) -> dict[str, Any]:
    """A config.json whose tower is the published one."""
    vision = PUBLISHED[family]
    return picture_models.config(family, hidden_size=vision["out_hidden_size"], num_hidden_layers=4) | {
        "vision_config": vision
    }


def refused(config: dict[str, Any]) -> dict[str, str]:
    """What is refused, by the field's name."""
    with pytest.raises(ConfigError) as caught:
        model_of(config, pictures=True)
    return {each.key.removeprefix("config.json: "): each.problem for each in caught.value.violations}


@pytest.mark.parametrize("family", PICTURES)
def test_names_and_shapes_are_those_of_transformers_whole_model(family: str) -> None:
    values = picture_models.config(family)
    read, model = model_of(values, pictures=True)
    assert read is PICTURES[family]
    fields = {name: value for name, value in values.items() if name != "model_type"}
    with torch.device("meta"):
        whole = AutoModelForImageTextToText.from_config(CONFIG_MAPPING[family](**copy.deepcopy(fields)))
    tower = {
        name.removeprefix("model."): tuple(tensor.shape)
        for name, tensor in whole.state_dict().items()
        if name.startswith("model.visual.")
    }
    ours = {name: info.shape for name, info in Table(read, model).hf_tensors.items() if name.startswith("visual.")}
    assert ours == tower
    text = set(Table(*model_of(values)).hf_tensors)
    assert Table(read, model).hf_tensors.keys() - tower.keys() == text


@pytest.mark.parametrize("family", PUBLISHED)
def test_published_towers_are_read_as_transformers_reads_them(family: str) -> None:
    config = published(family)
    _, model = model_of(config, pictures=True)
    theirs = CONFIG_MAPPING[family](**{k: v for k, v in copy.deepcopy(config).items() if k != "model_type"})
    vision = model.vision
    assert vision is not None and model.mrope is not None
    same = {
        "depth": vision.depth, "hidden_size": vision.hidden_size, "num_heads": vision.num_heads,
        "intermediate_size": vision.ffn_hidden_size, "patch_size": vision.patch_size,
        "spatial_merge_size": vision.merge_size, "temporal_patch_size": vision.temporal_patch_size,
        "window_size": vision.window_size, "num_position_embeddings": vision.num_positions or None,
    }  # fmt: skip
    assert same == {name: getattr(theirs.vision_config, name, None) for name in same}
    assert vision.full_blocks == list(getattr(theirs.vision_config, "fullatt_block_indexes", []))
    assert vision.deepstack == list(getattr(theirs.vision_config, "deepstack_visual_indexes", []))
    assert model.mrope.sections == theirs.text_config.rope_parameters["mrope_section"]
    assert model.mrope.interleaved == (family != "qwen2_5_vl")


@pytest.mark.parametrize("family", PUBLISHED)
def test_what_vision_config_leaves_out_is_the_default_of_the_class(family: str) -> None:
    width = {"qwen2_5_vl": 3584, "qwen3_vl": 3584}[family]
    config = picture_models.config(family, hidden_size=width, num_hidden_layers=4) | {"vision_config": {}}
    whole = CONFIG_MAPPING[family](**{k: v for k, v in copy.deepcopy(config).items() if k != "model_type"})
    saved = whole.vision_config.to_dict()
    assert model_of(config, pictures=True) == model_of(config | {"vision_config": saved}, pictures=True)


def test_without_pictures_nothing_changes() -> None:
    for family in PICTURES:
        config = picture_models.config(family)
        assert model_of(config)[1].vision is None and model_of(config)[1].mrope is None
        assert family_of(config).tower is None


def test_a_flat_file_has_its_axes_among_the_wholes_fields() -> None:
    nested = picture_models.config("qwen2_5_vl")
    text = {name: value for name, value in nested["text_config"].items() if name != "model_type"}
    rope = text.pop("rope_parameters")
    flat = {name: value for name, value in nested.items() if name != "text_config"} | text
    flat |= {"rope_theta": rope["rope_theta"], "vision_token_id": 9}
    flat |= {"rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}}
    assert model_of(flat, pictures=True) == model_of(nested, pictures=True)


def test_towers_that_are_not_read_are_refused_where_they_say_so() -> None:
    config = picture_models.config("qwen3_vl")
    vision = config["vision_config"]
    for changes, field, said in (
        ({"hidden_act": "gelu"}, "hidden_act", "another activation"),
        ({"in_channels": 4}, "in_channels", "colours"),
        ({"out_hidden_size": 32}, "out_hidden_size", "hidden_size=64"),
        ({"depth": "two"}, "depth", "no integer"),
        ({"use_registers": True}, "use_registers", "not known to have"),
        ({"rope_parameters": {"rope_type": "axial", "rope_theta": 5e5}}, "rope_parameters", "rotates otherwise"),
    ):
        problems = refused(config | {"vision_config": vision | changes})
        assert said in problems[f"vision_config.{field}"], problems
    wrong: tuple[tuple[dict[str, Any], str, str], ...] = (
        ({"num_position_embeddings": 15}, "num_position_embeddings", "no square"),
        ({"deepstack_visual_indexes": [0, 2]}, "depth", "blocks [2]"),
        ({"num_heads": 3}, "hidden_size", "rotates pairs"),
        ({"patch_size": 0}, "patch_size", "positive"),
    )
    for changes, key, said in wrong:
        problems = refused(config | {"vision_config": vision | changes})
        assert said in problems[f"vision_config.{key}"], problems


def test_axes_that_are_missing_or_do_not_fit_are_refused() -> None:
    config = picture_models.config("qwen3_vl")
    text = config["text_config"]
    for rope, said in (
        ({"rope_type": "default", "rope_theta": 1e4}, "no mrope_section"),
        (text["rope_parameters"] | {"mrope_interleaved": False}, "mrope_interleaved=false"),
    ):
        problems = refused(config | {"text_config": text | {"rope_parameters": rope}})
        assert said in problems["text_config.rope_parameters"], problems
    wrong = text["rope_parameters"] | {"mrope_section": [4, 4, 4]}
    problems = refused(config | {"text_config": text | {"rope_parameters": wrong}})
    assert "add up to the 16 rotated pairs" in problems["text_config.rope_parameters.mrope_section"]


def test_a_model_without_a_tower_is_given_no_pictures() -> None:
    for architecture in ("Gemma3ForConditionalGeneration", "Mistral3ForConditionalGeneration"):
        problems = refused(text_part_config(architecture))
        assert "sees pictures" in problems["architectures"]
    with pytest.raises(ConfigError, match="Qwen2_5_VLForConditionalGeneration"):
        family_of({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, pictures=True)


def test_the_first_chunk_needs_the_layers_that_features_go_to() -> None:
    _, model = model_of(picture_models.config("qwen3_vl", num_hidden_layers=4), pictures=True)
    assert layout_violations(model, parse_layout("pp=2"), 2) == []
    (violation,) = layout_violations(model, parse_layout("pp=2,vpp=2"), 2)
    assert "behind the first 2" in violation.problem and "Nearest layouts that fit" in violation.remedy
    (violation,) = layout_violations(model, ParallelConfig(pp=2, pipeline_layers=[1, 3]), 2)
    assert (violation.key, violation.value) == ("parallel.pipeline_layers", "[1,3]")
    assert "parallel.pipeline_layers=[2,2]" in violation.remedy
    assert layout_violations(model, ParallelConfig(pp=2, pipeline_layers=[3, 1]), 2) == []


def test_vllm_splits_the_heads_of_the_tower() -> None:
    _, model = model_of(picture_models.config("qwen3_vl"), pictures=True)
    said = [each.problem for each in rollout_violations(model, parse_rollout_layout("tp=4"))]
    assert "does not divide model.vision.num_heads=2" in said


def test_a_rule_of_a_tower_speaks_of_the_tower_alone() -> None:
    tensor = hf("visual.blocks.{l}.norm1.weight", "vision_hidden")
    for changes in ({"layers": Layers.dense}, {"stage": Stage.layer, "layers": Layers.deepstack}):
        with pytest.raises(AssertionError):
            Rule("vision.blocks.{l}.norm1.weight", (tensor,), **({"stage": Stage.tower} | changes))


@pytest.mark.parametrize(
    ("changed", "key"), [({"pixel_mean": [0.5]}, "pixel_mean"), ({"pixel_std": [0.5, 0.0, 0.5]}, "pixel_std")]
)
def test_pixels_are_normalised_by_three_numbers(changed: dict[str, Any], key: str) -> None:
    _, model = model_of(picture_models.config("qwen3_vl"), pictures=True)
    assert model.vision is not None and model_violations(model) == []
    (violation,) = model_violations(replace(model, vision=replace(model.vision, **changed)))
    assert violation.key == f"model.vision.{key}"
