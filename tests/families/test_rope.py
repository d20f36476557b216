"""Both spellings of RoPE, every type: the frequencies and factors that transformers computes, or a refusal by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from mcore_rl.config.model import ModelConfig, RopeType
from mcore_rl.families.registry import model_of
from mcore_rl.training.rope import frequency_sets, inverse_frequencies
from tests.families.test_fields import refused
from tests.support.published import FACTS, TINY, class_config

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
SCALINGS: list[dict[str, Any] | None] = [
    None,
    {"rope_type": "default"},
    {"type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 256},
    {**LLAMA3, "original_max_position_embeddings": 64},
    LLAMA3,
    YARN,
    {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"type": "yarn", "rope_type": "yarn", "factor": 4},
    {**YARN, "factor": None, "original_max_position_embeddings": 64},
    {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
    {**YARN, "attention_factor": 1.5},
    {**YARN, "attention_factor": 1.5, "mscale": 1.0, "mscale_all_dim": 0.5},
    {**YARN, "beta_fast": 8, "beta_slow": 2, "truncate": False, "original_max_position_embeddings": 64},
]


def assert_transformers_numbers(facts: dict[str, Any]) -> ModelConfig:
    _, model = model_of(facts)
    layers = 2 if model.local_rotary_base is None else model.num_layers  # of both kinds
    types = {"layer_types": facts["layer_types"][:layers]} if "layer_types" in facts else {}
    small = class_config({**facts, **types, "num_hidden_layers": layers, "vocab_size": 8})
    reference = AutoModelForCausalLM.from_config(small).model
    if model.local_rotary_base is not None:
        ours, embedding = frequency_sets(model), reference.rotary_emb
        assert torch.equal(ours[0], embedding.full_attention_inv_freq)
        assert torch.equal(ours[1], embedding.sliding_attention_inv_freq)
        assert embedding.full_attention_attention_scaling == embedding.sliding_attention_attention_scaling == 1.0
        return model
    frequencies = inverse_frequencies(model.rope, model.rotary_base, model.rotary_dim)
    assert torch.equal(frequencies, reference.rotary_emb.inv_freq)
    assert model.rope.attention_factor == reference.rotary_emb.attention_scaling
    return model


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_frequencies_and_factor_are_those_of_transformers(scaling: dict[str, Any] | None, spelling: str) -> None:
    facts = {key: value for key, value in TINY["llama"].items() if not key.startswith("rope")}
    if spelling == "rope_parameters":
        facts |= {spelling: {**(scaling or {}), "rope_theta": 5000.0}}
    else:
        facts |= {spelling: scaling, "rope_theta": 5000.0}
    assert assert_transformers_numbers(facts).rotary_base == 5000.0


@pytest.mark.parametrize("name", TINY)
def test_tiny_models_rotate_as_in_transformers(name: str) -> None:
    assert_transformers_numbers(TINY[name])


@pytest.mark.parametrize("both", [{}, {"mscale": 1.0, "mscale_all_dim": 1.0}, {"mscale": 0.707, "mscale_all_dim": 0.5}])
def test_latent_attention_scales_as_in_transformers(both: dict[str, float]) -> None:
    facts = {**TINY["deepseek_v3"], "rope_scaling": {**YARN, **both}}
    model = assert_transformers_numbers(facts)
    layer = AutoModelForCausalLM.from_config(class_config(facts)).model.layers[0].self_attn
    scale = model.head_dim**-0.5 if model.softmax_scale is None else model.softmax_scale
    assert scale == pytest.approx(layer.scaling, rel=1e-15)
    assert (model.softmax_scale is None) == (not both)


def test_a_dynamic_rope_is_the_default_up_to_its_length() -> None:
    _, model = model_of({**TINY["llama"], "rope_scaling": {"type": "dynamic", "factor": 4.0}})
    assert model.rope.type is RopeType.default
    assert model.max_position_embeddings == 256
    reference = AutoModelForCausalLM.from_config(
        class_config({**TINY["llama"], "rope_scaling": {"type": "dynamic", "factor": 4.0}})
    ).model.rotary_emb
    expected = inverse_frequencies(model.rope, model.rotary_base, model.head_dim)
    reference(torch.zeros(1), torch.arange(256)[None])
    assert torch.equal(reference.inv_freq, expected)
    reference(torch.zeros(1), torch.arange(257)[None])
    assert not torch.equal(reference.inv_freq, expected)  # where ours ends, so do sequences


@pytest.mark.parametrize(
    ("scaling", "fields"),
    [
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}, ["rope_type"]),
        ({"type": "su", "factor": 2.0}, ["type"]),
        ({"type": "mrope", "mrope_section": [16, 24, 24]}, ["type"]),
        ({"rope_type": "proportional"}, ["rope_type"]),
        ({"type": "default", "mrope_section": [16, 24, 24]}, ["mrope_section"]),
        ({"type": "default", "factor": 2.0}, ["factor"]),
        ({"type": "linear", "factor": 2.0, "beta_fast": 8}, ["beta_fast"]),
        ({"type": "linear"}, ["factor"]),
        ({"type": "linear", "factor": 0.5}, ["factor"]),
        ({"type": "linear", "factor": "2"}, ["factor"]),
        ({"type": "linear", "rope_type": "yarn", "factor": 2.0}, ["type"]),
        ({"type": "dynamic", "alpha": 2.0}, ["factor", "alpha"]),
        (
            {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64},
            ["original_max_position_embeddings"],
        ),
        ({**LLAMA3, "low_freq_factor": 4.0}, ["low_freq_factor"]),
        ({"rope_type": "llama3", "factor": 8.0}, ["low_freq_factor", "high_freq_factor"]),
        ({**YARN, "mscale": 1.0}, ["mscale"]),
        ({**YARN, "mscale": 0.0, "mscale_all_dim": 1.0}, ["mscale"]),
        ({**YARN, "finetuned": True}, ["finetuned"]),
        ({**YARN, "partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ({**YARN, "original_max_position_embeddings": 0}, ["original_max_position_embeddings"]),
        ({"full_attention": {"rope_type": "default"}}, ["full_attention"]),
    ],
)
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_what_rope_does_not_know_is_refused_by_name(scaling: dict[str, Any], fields: list[str], spelling: str) -> None:
    facts = {key: value for key, value in TINY["llama"].items() if not key.startswith("rope")}
    assert list(refused({**facts, spelling: scaling})) == [f"{spelling}.{field}" for field in fields]


def test_contradictions_are_refused() -> None:
    facts = {**TINY["qwen3"], "rope_theta": 1e6}
    assert list(refused({**facts, "rope_parameters": {"rope_theta": 1e4}})) == ["rope_theta"]
    assert not refused({**facts, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}})
    assert "rope_parameters" in refused({**facts, "rope_parameters": {"rope_theta": 1e6}, "rope_scaling": YARN})
    assert list(refused({**facts, "partial_rotary_factor": 0.5})) == ["partial_rotary_factor"]


@pytest.mark.parametrize(
    ("scaling", "field"),
    [
        ({"type": "linear", "factor": 2.0}, "type"),
        ({**LLAMA3, "original_max_position_embeddings": 64}, "rope_type"),
        ({"type": "dynamic", "factor": 2.0}, "type"),
        ({**YARN, "attention_factor": 1.0}, "attention_factor"),
    ],
)
def test_latent_attention_refuses_what_vllm_reads_differently(scaling: dict[str, Any], field: str) -> None:
    assert list(refused({**TINY["deepseek_v3"], "rope_scaling": scaling})) == [f"rope_scaling.{field}"]


def test_the_long_checkpoints() -> None:
    _, deepseek = model_of(FACTS["deepseek-ai/DeepSeek-V3"])
    assert deepseek.softmax_scale == pytest.approx(192**-0.5 * (0.1 * 3.6888794541139363 + 1) ** 2)  # ln 40
    assert deepseek.rope.attention_factor == 1.0
    _, llama = model_of(FACTS["meta-llama/Llama-3.1-8B-Instruct"])
    assert (llama.rope.type, llama.rope.original_max_position_embeddings) == (RopeType.llama3, 8192)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("factor", 8.0),
        ("attention_factor", 1.5),
        ("short_mscale", 1.1),
        ("short_factor", [1.0] * 11),
        ("short_factor", [1.0] * 11 + [0.0]),
        ("long_factor", None),
        ("original_max_position_embeddings", 64),
        ("type", "yarn"),
    ],
)
def test_longrope_is_refused_where_transformers_and_vllm_part(field: str, value: object) -> None:
    scaling = {**TINY["phi3"]["rope_scaling"], field: value}
    wanted = "rope_scaling" if value == [1.0] * 11 else f"rope_scaling.{field}"
    assert wanted in refused({**TINY["phi3"], "rope_scaling": scaling})


def test_longrope_ends_where_its_first_frequencies_do() -> None:
    _, model = model_of({**TINY["phi3"], "rope_scaling": {**TINY["phi3"]["rope_scaling"], "type": "su"}})
    assert model == model_of(TINY["phi3"])[1]
    assert (model.max_position_embeddings, model.rotary_dim, model.head_dim) == (256, 24, 32)
    plain = {key: value for key, value in TINY["phi3"].items() if key != "rope_scaling"}
    assert model_of(plain)[1].max_position_embeddings == 1024
    assert "partial_rotary_factor" in refused({**plain, "partial_rotary_factor": 0.6})  # 19 of 32 dimensions


def test_the_rotated_share_stands_beside_theta_or_with_it() -> None:
    facts = {name: value for name, value in TINY["glm4_moe"].items() if name not in ("rope_theta", "rope_scaling")}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    left_out = {name: value for name, value in facts.items() if name != "partial_rotary_factor"}
    for config, share in (
        ({**facts, "rope_parameters": rope}, 0.5),
        ({**left_out, "rope_parameters": rope}, 0.5),
        ({**left_out, "rope_parameters": {**rope, "partial_rotary_factor": 0.25}}, 0.25),
        ({**facts, "rope_parameters": {**rope, "partial_rotary_factor": 0.5}}, 0.5),
    ):
        model = assert_transformers_numbers(config)
        assert (model.rotary_percent, model.rotary_dim) == (share, 32 * share)
    both = {**facts, "rope_parameters": {**rope, "partial_rotary_factor": 0.25}}
    assert list(refused(both)) == ["partial_rotary_factor"]
    wrong = {**left_out, "rope_parameters": {**rope, "partial_rotary_factor": "half"}}
    assert list(refused(wrong)) == ["partial_rotary_factor"]
