"""The text part of config.json: by the defaults and the modules of transformers' own multimodal classes."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from mcore_rl.families.config_changes import ConfigChanges
from mcore_rl.families.registry import family_of, model_of
from mcore_rl.families.text_part import TEXT_PARTS, text_config, with_text
from mcore_rl.ground.errors import ConfigError
from mcore_rl.weights.table import Table
from tests.families.test_fields import refused
from tests.support import text_parts
from tests.support.text_parts import TEXT

QWEN, QWEN3, MOE, GEMMA = (
    f"{name}ForConditionalGeneration" for name in ("Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe", "Gemma3")
)
MISTRAL, KIMI = "Mistral3ForConditionalGeneration", "KimiK25ForConditionalGeneration"


def of_class(values: dict[str, Any]) -> dict[str, Any]:
    """All fields that transformers' class has for ``values``, as it would save them."""
    fields = {name: value for name, value in values.items() if name != "model_type"}
    made = CONFIG_MAPPING[values["model_type"]](**copy.deepcopy(fields))
    saved: dict[str, Any] = json.loads(made.to_json_string(use_diff=False))
    return saved | {"architectures": values["architectures"]}


def test_every_row_is_of_a_model_that_is_tested_here_and_that_transformers_has() -> None:
    assert {part.architecture: (part.model_type, part.text_model_type) for part in TEXT_PARTS} == {
        name: (kind, family) for name, (kind, _, family) in TEXT.items()
    }
    spelt = {name: name.replace("KimiK25", "Kimi_K25") for name in TEXT}  # as the publisher spells it
    known = set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items())
    assert {(part.model_type, spelt[part.architecture]) for part in TEXT_PARTS} <= known


@pytest.mark.parametrize("architecture", TEXT)
def test_names_and_shapes_are_those_within_transformers_model(architecture: str) -> None:
    values = text_parts.config(architecture)
    with torch.device("meta"):
        fields = {name: value for name, value in values.items() if name != "model_type"}
        whole = AutoModelForImageTextToText.from_config(CONFIG_MAPPING[values["model_type"]](**fields))
    inner = {
        name.replace("model.language_model.", "model.", 1): tuple(tensor.shape)
        for name, tensor in whole.state_dict().items()
        if name.startswith(("model.language_model.", "lm_head."))
    }
    if values["tie_word_embeddings"]:
        del inner["lm_head.weight"]
    ours = {name: info.shape for name, info in Table(*model_of(values)).hf_tensors.items()}
    alone = {name: shape for name, shape in inner.items() if ".experts." not in name}
    assert alone == {name: shape for name, shape in ours.items() if ".experts." not in name}
    sizes = [
        sum(torch.Size(shape).numel() for name, shape in each.items() if ".experts." in name) for each in (inner, ours)
    ]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("architecture", TEXT)
def test_what_the_file_leaves_out_is_the_default_of_the_multimodal_class(architecture: str) -> None:
    kind, text_kind, _ = TEXT[architecture]
    least = {"architectures": [architecture], "model_type": kind, "text_config": {"model_type": text_kind}}
    if architecture == MOE:
        least["text_config"]["num_experts"] = 60  # the class's default; nobody leaves it out
    if architecture == KIMI:  # whose class does not have what vLLM asks of every checkpoint
        least["text_config"] |= {"num_key_value_heads": 128}
    assert model_of(least) == model_of(of_class(least))


@pytest.mark.parametrize("architecture", TEXT)
def test_what_transformers_saves_is_what_it_was_made_of(architecture: str) -> None:
    values = text_parts.config(architecture)
    assert model_of(values) == model_of(of_class(values))


def test_a_flat_file_is_the_nested_one() -> None:
    """Qwen2.5-VL was published with the text's fields among the whole's, and positions of a type of their own."""
    nested = text_parts.config(QWEN)
    text = {name: value for name, value in nested["text_config"].items() if name != "model_type"}
    rope = text.pop("rope_parameters")
    flat = {name: value for name, value in nested.items() if name != "text_config"} | text
    flat |= {"rope_theta": rope["rope_theta"], "vision_token_id": 9}
    flat |= {"rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}}
    assert model_of(flat) == model_of(nested)
    assert family_of(flat).name == "qwen2"


def test_whether_it_is_tied_is_said_where_transformers_reads_it() -> None:
    for architecture, by_text in ((QWEN3, False), (MOE, False), (MISTRAL, True)):
        config = text_parts.config(architecture)
        config["tie_word_embeddings"] = by_text
        config["text_config"]["tie_word_embeddings"] = not by_text
        assert not model_of(config)[1].tie_output


def test_another_text_part_is_refused_where_it_stands() -> None:
    config = text_parts.config(MISTRAL)
    (key,) = refused(config | {"text_config": config["text_config"] | {"model_type": "ministral3"}})
    assert key == "text_config.model_type"
    (key,) = refused(config | {"model_type": "ministral3"})
    assert key == "model_type"
    (key,) = refused(config | {"text_config": config["text_config"] | {"hidden_act": "gelu"}})
    assert key == "text_config.hidden_act"
    moe = text_parts.config(MOE)
    (key,) = refused(moe | {"text_config": moe["text_config"] | {"norm_topk_prob": False}})
    assert key == "text_config.norm_topk_prob"
    (key,) = refused(config | {"quantization_config": {"quant_method": "gptq"}})
    assert key == "text_config.quantization_config"


def test_changes_are_of_the_texts_fields_and_are_written_there() -> None:
    config = text_parts.config(GEMMA)
    changed = ConfigChanges(overrides={"sliding_window": 99, "tie_word_embeddings": True}).apply(config)
    assert changed["text_config"]["sliding_window"] == 99 and "sliding_window" not in changed
    assert changed["tie_word_embeddings"] is True
    assert changed["vision_config"] == config["vision_config"]
    assert model_of(changed)[1].sliding_window == 99
    with pytest.raises(ConfigError, match="mm_tokens_per_image"):
        model_of(ConfigChanges(overrides={"mm_tokens_per_image": 3}).apply(config))
    assert with_text({"a": 1}, {"b": 2}, ("a",)) == {"b": 2}
    assert text_config({"a": 1}) == {"a": 1}
