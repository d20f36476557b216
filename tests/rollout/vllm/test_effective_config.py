"""What transformers, Megatron and vLLM compute with, read back from their own modules, for every family.

The oracle is what was changed: of two sides that were given config.json with one field between them, exactly that field
is named; of sides that were given the same, none is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from mcore_rl.config.parallel import parse_layout
from mcore_rl.families.registry import model_of
from mcore_rl.proofs.effective_config import EffectiveConfig, config_differences, joined, unread
from mcore_rl.reports import transformers_config
from mcore_rl.rollout.vllm.oracle import VllmProcess
from tests.support.published import TINY, class_config

Facts = dict[str, Any]
Read = Callable[[Facts], EffectiveConfig]
ROPE = "rotary_frequencies"


@pytest.fixture(scope="module")
def sides(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Read]]:
    """What reads each side's modules, built of a config.json.  vLLM's are in bfloat16, which rounds its cosines."""
    folder = tmp_path_factory.mktemp("configured")
    with VllmProcess() as process:

        def vllm(facts: Facts) -> EffectiveConfig:
            (folder / "config.json").write_text(json.dumps(facts))
            return process.effective_config(folder)

        yield {"vllm": vllm, "transformers": transformers, "megatron": megatron}


def transformers(facts: Facts) -> EffectiveConfig:
    torch.manual_seed(0)
    return transformers_config.effective_config(AutoModelForCausalLM.from_config(class_config(facts)))


def megatron(facts: Facts, layout: str = "", world_size: int = 1) -> EffectiveConfig:
    """Of all ranks, one after another."""
    from mcore_rl.training.effective_config import effective_config
    from mcore_rl.training.meta import meta_chunks

    _, model = model_of(facts)
    parts = []
    for rank in range(world_size):
        with meta_chunks(model, parse_layout(layout), world_size, rank, device=torch.device("cpu")) as chunks:
            parts.append(effective_config(chunks, model))
    return joined(parts)


@pytest.fixture(scope="module")
def alike(sides: dict[str, Read]) -> dict[str, dict[str, EffectiveConfig]]:
    """Family -> side -> what it computes with, all of the same config.json."""
    return {name: {side: read(facts) for side, read in sides.items()} for name, facts in TINY.items()}


@pytest.mark.tier("test")
@pytest.mark.parametrize("name", TINY)
def test_nothing_is_named_where_nothing_differs(name: str, alike: dict[str, dict[str, EffectiveConfig]]) -> None:
    assert config_differences(alike[name]) == []
    assert unread(alike[name]) == {}, "what a side does not tell cannot be compared"
    facts = TINY[name]
    for config in alike[name].values():
        layers = [fields for place, fields in config.items() if place.startswith("layer ")]
        assert len(layers) == facts["num_hidden_layers"]
        assert all(fields["norm_epsilon"] == facts["rms_norm_eps"] for fields in layers)
        assert all((ROPE in fields) != ("linear_attention.num_key_heads" in fields) for fields in layers)
        assert sum("moe.top_k" in fields for fields in layers) == _layers_with_experts(facts)


def _layers_with_experts(facts: Facts) -> int:
    _, model = model_of(facts)
    return sum(model.has_experts(layer) for layer in range(model.num_layers))


def rope(name: str, **changed: object) -> Facts:
    return {"rope_scaling": TINY[name]["rope_scaling"] | changed}


# Family, what changes in its config.json, and the fields that must be named.
CHANGES: list[tuple[str, Facts, set[str]]] = [
    ("llama", {"rope_theta": 10000.0}, {ROPE}),
    ("llama", {"rms_norm_eps": 1e-3}, {"norm_epsilon"}),
    ("llama", {"tie_word_embeddings": True}, {"tie_output"}),
    ("llama", rope("llama", factor=8.0), {ROPE}),
    ("llama", rope("llama", low_freq_factor=2.0), {ROPE}),
    ("llama", {"rope_scaling": None}, {ROPE}),
    ("mistral", {"sliding_window": 40}, {"sliding_window"}),
    ("mistral", {"sliding_window": None}, {"sliding_window"}),
    ("mistral", {"num_key_value_heads": 4}, {"num_query_groups"}),
    ("mixtral", {"num_experts_per_tok": 3}, {"moe.top_k"}),
    ("mixtral", {"rope_theta": 990000.0}, {ROPE}),
    ("qwen2", rope("qwen2", attention_factor=1.3), {"softmax_scale"}),
    ("qwen2", rope("qwen2", beta_fast=4.0), {ROPE}),
    ("qwen2", rope("qwen2", factor=8.0), {ROPE, "softmax_scale"}),
    ("qwen3", {"rms_norm_eps": 1e-5}, {"norm_epsilon", "inner_norm_epsilon"}),
    ("qwen2_moe", {"norm_topk_prob": True}, {"moe.norm_topk_prob"}),
    ("qwen2_moe", {"num_experts_per_tok": 1}, {"moe.top_k"}),
    ("qwen3_moe", {"norm_topk_prob": False}, {"moe.norm_topk_prob"}),
    ("qwen3_moe", {"num_experts_per_tok": 4}, {"moe.top_k"}),
    ("qwen3_moe", {"num_experts": 16}, {"moe.num_experts"}),
    ("gemma2", {"sliding_window": 25}, {"sliding_window"}),
    ("gemma2", {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, {"sliding_window"}),
    ("gemma2", {"attn_logit_softcapping": 6.0}, {"attention_soft_cap"}),
    ("gemma2", {"attn_logit_softcapping": None}, {"attention_soft_cap"}),
    ("gemma2", {"final_logit_softcapping": 30.0}, {"output_soft_cap"}),
    ("gemma2", {"query_pre_attn_scalar": 64}, {"softmax_scale"}),
    ("gpt_oss", {"num_experts_per_tok": 3}, {"moe.top_k"}),
    ("gpt_oss", {"sliding_window": 40}, {"sliding_window"}),
    ("gpt_oss", rope("gpt_oss", factor=8.0), {ROPE, "softmax_scale"}),
    ("gpt_oss", rope("gpt_oss", truncate=True), {ROPE}),
    ("seed_oss", {"rope_theta": 1e6}, {ROPE}),
    ("smollm3", {"no_rope_layers": [1, 1, 1, 0]}, {ROPE}),
    ("smollm3", {"rms_norm_eps": 1e-5}, {"norm_epsilon"}),
    ("ernie4_5", {"rope_theta": 1e6}, {ROPE}),
    ("minimax_m2", {"rotary_dim": 8}, {ROPE}),
    ("minimax_m2", {"num_experts_per_tok": 3}, {"moe.top_k"}),
    ("glm4_moe_lite", {"routed_scaling_factor": 1.0}, {"moe.routed_scaling_factor"}),
    ("deepseek_v3", {"rope_theta": 20000.0}, {ROPE}),
    ("deepseek_v3", {"routed_scaling_factor": 1.0}, {"moe.routed_scaling_factor"}),
    ("deepseek_v3", {"norm_topk_prob": False}, {"moe.norm_topk_prob"}),
    ("deepseek_v3", {"n_group": 2, "topk_group": 1}, {"moe.num_groups", "moe.top_k_groups"}),
    ("deepseek_v3", {"topk_group": 3}, {"moe.top_k_groups"}),
    ("deepseek_v3", rope("deepseek_v3", mscale=0.5), {"rotary_factor"}),
]


@pytest.mark.tier("test")
@pytest.mark.parametrize(("name", "changed", "fields"), CHANGES)
def test_the_field_that_one_side_has_otherwise_is_named(
    name: str, changed: Facts, fields: set[str], sides: dict[str, Read], alike: dict[str, dict[str, EffectiveConfig]]
) -> None:
    for side, read in sides.items():
        lines = config_differences(alike[name] | {side: read(TINY[name] | changed)})
        assert {line.split(" of ")[0] for line in lines} == fields, (side, lines)


def test_a_line_says_where_and_what(sides: dict[str, Read], alike: dict[str, dict[str, EffectiveConfig]]) -> None:
    other = {"rope_theta": 20000.0, "rms_norm_eps": 1e-3}
    assert config_differences(alike["mistral"] | {"vllm": sides["vllm"](TINY["mistral"] | other)}) == [
        "norm_epsilon of layers 0, 1 and the final norm: vllm 0.001, transformers 1e-05, megatron 1e-05",
        "rotary_frequencies of layers 0, 1: vllm 16 pairs of base 20000, transformers 16 pairs of base 10000, "
        "megatron 16 pairs of base 10000",
    ]


@pytest.mark.parametrize(
    ("name", "layout", "world_size"),
    [("gemma2", "tp=2,pp=2", 4), ("deepseek_v3", "pp=3,ep=2", 6), ("llama", "vpp=1,pp=2", 2)],
)
def test_the_ranks_of_a_layout_together_tell_the_same(
    name: str, layout: str, world_size: int, alike: dict[str, dict[str, EffectiveConfig]]
) -> None:
    of_ranks = megatron(TINY[name], layout, world_size)
    assert of_ranks.keys() == alike[name]["megatron"].keys()
    assert config_differences({"one": alike[name]["megatron"], "many": of_ranks}) == []
    assert unread({"one": alike[name]["megatron"], "many": of_ranks}) == {}


def test_ranks_that_contradict_each_other_are_named() -> None:
    one: EffectiveConfig = {"layer 0": {"norm_epsilon": 1e-5}}
    parts: list[EffectiveConfig] = [one, one, {"layer 0": {"norm_epsilon": 1e-6}}]
    (line,) = config_differences({"megatron": joined(parts), "vllm": one})
    assert line == "norm_epsilon of layer 0: megatron 1e-05, but 1e-06 on rank 2, vllm 1e-05"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("base", [1e4, 1e6])
def test_frequencies_are_read_from_rounded_cosines(base: float, dtype: torch.dtype) -> None:
    from mcore_rl.proofs.effective_config import frequencies_of

    expected = base ** (-torch.arange(64, dtype=torch.float64) / 64)
    angles = torch.outer(torch.arange(5000, dtype=torch.float64), expected)
    read, factor = frequencies_of((1.25 * angles.cos()).to(dtype), (1.25 * angles.sin()).to(dtype))
    assert read == pytest.approx(expected.tolist(), rel=1e-5 if dtype is torch.float32 else 5e-4)
    assert factor == pytest.approx(1.25, rel=1e-3)
