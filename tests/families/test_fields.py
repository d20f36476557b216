"""Each field of a configuration is read, refused by name, or on a list of those that change nothing."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedConfig

from mcore_rl.families.fields import IGNORED, NEUTRAL, Fields, same
from mcore_rl.families.registry import FAMILIES, model_of, unread_fields
from mcore_rl.ground.errors import ConfigError, Violation
from tests.support.published import FACTS, TINY, WRITTEN

# Beside IGNORED: what the family says changes nothing, and what nothing reads while windows are off.
IGNORED_BY_FAMILY = {
    "llama": set(),
    "mistral": set(),
    "mixtral": set(),
    "qwen2": {"sliding_window", "max_window_layers"},
    "qwen3": {"sliding_window", "max_window_layers"},
    "qwen2_moe": {"sliding_window", "max_window_layers"},
    "qwen3_moe": {"sliding_window", "max_window_layers"},
    "gemma2": set(),
    "gemma3_text": {"_sliding_window_pattern"},
    "qwen3_next": {"sliding_window", "max_window_layers"},
    "qwen3_5_text": {"sliding_window", "max_window_layers"},
    "qwen3_5_moe_text": {"sliding_window", "max_window_layers"},
    "olmoe": set(),
    "phi3": {"original_max_position_embeddings"},  # nothing reads it without longrope
    "deepseek_v3": {"num_nextn_predict_layers"},
    "deepseek_v2": set(),
    "glm4_moe": {"num_nextn_predict_layers"},
    "glm4_moe_lite": set(),
    "minimax_m2": set(),
    "gpt_oss": set(),
    "seed_oss": {"attention_dropout", "residual_dropout"},  # which only training applies
    "smollm3": {"sliding_window", "no_rope_layer_interval"},  # the layers are listed
    "ernie4_5": set(),
}
# What other families refuse.
IMPLEMENTED = {"glm4_moe": {"attention_bias", "use_qk_norm"}}
# What other families refuse and this one always has.
DEMANDED = {"gpt_oss": {"attention_bias"}, "seed_oss": {"attention_bias"}}
DROPPED = {"seed_oss": {"attention_dropout"}}  # here nothing is, whatever the file says


def refused(config: dict[str, Any]) -> dict[str, Violation]:
    """What ``config`` is refused for, by field; empty where it is read."""
    violations: tuple[Violation, ...] = ()
    try:
        model_of(config)
    except ConfigError as error:
        violations = error.violations
    assert all(violation.key.startswith("config.json: ") for violation in violations), violations
    return {violation.key.removeprefix("config.json: "): violation for violation in violations}


def other(name: str, value: Any) -> Any:
    """A value of the same kind that is not ``value``."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        return value * 2 if value else 1
    if isinstance(value, str):
        return value + "_x"
    if isinstance(value, list):
        return ["sliding_attention"] * len(value) if name == "layer_types" else [*value, 0]
    return {**value, "rope_theta": 2.0}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_field_of_the_class_matters_is_refused_or_is_listed(name: str) -> None:
    """No field that transformers' class knows can be changed without a different model, a refusal or a listing."""
    architectures = list(FAMILIES[name].architectures)
    written = CONFIG_MAPPING[name](architectures=architectures, **WRITTEN.get(name, {})).to_dict()
    plain = dict(written)
    if name.startswith("qwen"):  # windows as the checkpoints write them, with a size and switched off
        plain |= {"sliding_window": 4096, "max_window_layers": 28}
        plain.pop("layer_types", None)
    unnoticed = set()
    for field, value in {**written, **plain}.items():
        changed = {**plain, field: other(field, value)}
        if not refused(changed) and model_of(changed) == model_of(plain):
            unnoticed.add(field)
    assert unnoticed - IGNORED == IGNORED_BY_FAMILY[name]


# Field -> the families whose code in transformers or vLLM reads it, by their sources (transformers 5.19, vLLM 0.32).
EXTRAS: dict[str, tuple[object, set[str]]] = {
    # vLLM's phi3 and ernie4_5 are its llama; what transformers computes for it, it scales itself.
    "logit_scale": (0.5, {"llama", "mistral", "phi3", "ernie4_5", "seed_oss", "smollm3"}),
    "attn_logit_cap": (20.0, set()),
    "clip_qkv": (8.0, {"olmoe"}),
    "dual_chunk_attention_config": ({"chunk_size": 8}, set(FAMILIES)),
    "quantization": ({"bits": 4}, set(FAMILIES)),
    "index_topk": (2048, set(FAMILIES)),
    "some_new_switch": (False, set()),
    "some_new_size": (None, set()),
    "rope_interleaved": (False, set()),
    "sliding_window_size": (4096, set()),
    "use_qk_norm": (True, {"glm4_moe_lite"}),  # beside GLM-4.5, whose file vLLM's imports
}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("field", EXTRAS)
def test_an_unknown_field_is_refused_by_name_if_anybody_reads_it_and_noted_if_not(name: str, field: str) -> None:
    value, readers = EXTRAS[field]
    config = {**TINY[name], field: value}
    if field in IMPLEMENTED.get(name, ()):
        assert model_of(config) != model_of({**TINY[name], field: not value})
        return
    refusals = refused(config)
    if name in readers:
        assert list(refusals) == [field]
        assert "may change the numbers" in str(refusals[field]) or "not supported" in str(refusals[field])
        return
    assert not refusals and field in unread_fields(config)
    assert model_of(config) == model_of(TINY[name])


def test_a_refused_field_names_both_ways_to_leave_it_out() -> None:
    remedy = refused({**TINY["llama"], "index_topk": 4})["index_topk"].remedy
    assert "model.ignore_fields=[index_topk]" in remedy and "--ignore-field index_topk" in remedy


def test_a_family_whose_readers_are_not_known_refuses_what_it_does_not_take() -> None:
    fields = Fields({"some_new_switch": False, "hidden_dropout": 0.0})
    assert [violation.key for violation in fields.unread()] == ["config.json: some_new_switch"] and not fields.notes


NOT_READ = {"attention_bias": {"mixtral", "qwen2", "qwen2_moe"}}  # vLLM's mistral is its llama, which reads it
WITH_WINDOWS = {"qwen2", "qwen2_moe", "qwen3", "gemma2"}  # see test_windows


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attention_bias", True), ("attention_dropout", 0.1), ("hidden_act", "relu"), ("is_encoder_decoder", True),
        ("layer_types", ["sliding_attention", "full_attention"]),
    ],
)  # fmt: skip
def test_what_is_not_implemented_is_refused_by_name_if_anybody_reads_it(name: str, field: str, value: object) -> None:
    config = {**TINY[name], field: value}
    if field in IMPLEMENTED.get(name, ()):
        assert model_of(config) != model_of({**TINY[name], field: False})
    elif field in DROPPED.get(name, ()):
        assert model_of(config) == model_of(TINY[name])
    elif field in DEMANDED.get(name, ()):
        assert list(refused({**TINY[name], field: False})) == [field] and not refused(config)
    elif name in NOT_READ.get(field, ()):
        assert not refused(config) and field in unread_fields(config)
    elif field != "layer_types" or name not in WITH_WINDOWS:
        assert list(refused(config)) == [field]


@pytest.mark.parametrize("name", FAMILIES)
def test_what_tools_add_when_they_save_a_copy_changes_nothing(name: str) -> None:
    """Unsloth, PEFT's merges, trainers: switches of their own, dropout of 0, nulls."""
    added = {
        "unsloth_fixed": True, "unsloth_version": "2026.3.3", "_attn_implementation": "eager", "attn_pdrop": 0.0,
        "hidden_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0, "hidden_dropout_prob": 0.0, "layer_types": None,
        "neftune_noise_alpha": 0.0, "sliding_window_pattern": None, "pretraining_tp": 2,
    }  # fmt: skip
    config = {**TINY[name], **{field: value for field, value in added.items() if field not in TINY[name]}}
    assert model_of(config) == model_of(TINY[name])
    assert set(unread_fields(config)) >= {"unsloth_fixed", "unsloth_version", "neftune_noise_alpha"}


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("llama", "mlp_bias", True),
        ("llama", "sliding_window", 64),
        ("llama", "layer_types", ["sliding_attention"] * 2),
        ("llama", "layer_types", "full_attention"),
        ("mistral", "layer_types", ["full_attention"] * 2),
        ("qwen3_moe", "shared_expert_intermediate_size", 64),
        ("mixtral", "router_jitter_noise", 0.01),
        ("qwen2", "head_dim", 64),
        ("qwen2_moe", "qkv_bias", False),
        ("qwen2_moe", "shared_expert_intermediate_size", 0),
        ("qwen3_moe", "use_sliding_window", True),
        ("qwen3_next", "attn_output_gate", False),
        ("qwen3_next", "output_gate_type", "sigmoid"),
        ("qwen3_next", "layer_scale", True),
        ("qwen3_next", "is_causal", False),
        ("qwen3_next", "tie_word_embeddings", True),
        ("qwen3_next", "full_attention_interval", 0),
        ("qwen3_next", "linear_num_value_heads", 3),
        ("qwen3_next", "shared_expert_intermediate_size", 0),
        ("qwen3_next", "layer_types", ["linear_attention"] * 3),
        ("qwen3_5_text", "attn_output_gate", False),
        ("qwen3_5_text", "output_gate_type", "sigmoid"),
        ("qwen3_5_text", "full_attention_interval", 0),
        ("qwen3_5_text", "linear_num_value_heads", 3),
        ("qwen3_5_moe_text", "norm_topk_prob", False),
        ("qwen3_5_moe_text", "shared_expert_intermediate_size", 0),
        ("olmoe", "clip_qkv", 8.0),
        ("olmoe", "norm_topk_prob", True),
        ("olmoe", "rms_norm_eps", 1e-6),
        ("olmoe", "head_dim", 16),
        ("olmoe", "tie_word_embeddings", True),
        ("phi3", "resid_pdrop", 0.1),
        ("phi3", "embd_pdrop", 0.1),
        ("phi3", "head_dim", 16),
        ("phi3", "full_attn_mod", 2),
        ("phi3", "lm_head_bias", True),
        ("gemma3_text", "attn_logit_softcapping", 30.0),
        ("gemma3_text", "use_bidirectional_attention", True),
        ("gemma3_text", "tie_word_embeddings", False),
        ("gemma3_text", "hidden_size", 66),
        ("gemma3_text", "sliding_window_pattern", 0),
        ("gemma2", "hidden_activation", "gelu"),
        ("gemma2", "tie_word_embeddings", False),
        ("gemma2", "use_bidirectional_attention", True),
        ("gemma2", "query_pre_attn_scalar", 0),
        ("gemma2", "layer_types", ["chunked_attention"] * 4),
        ("gemma2", "layer_types", ["full_attention"]),
        ("deepseek_v3", "scoring_func", "softmax"),
        ("deepseek_v3", "topk_method", "greedy"),
        ("deepseek_v3", "moe_layer_freq", 2),
        ("deepseek_v3", "rope_interleave", False),
        ("deepseek_v3", "num_key_value_heads", 2),
        ("deepseek_v3", "head_dim", 48),
        ("deepseek_v3", "qk_head_dim", 32),
        ("deepseek_v3", "n_shared_experts", 0),
        ("deepseek_v2", "scoring_func", "sigmoid"),
        ("deepseek_v2", "topk_method", "noaux_tc"),
        ("deepseek_v2", "norm_topk_prob", True),
        ("deepseek_v2", "moe_layer_freq", 2),
        ("deepseek_v2", "n_group", None),
        ("deepseek_v2", "n_shared_experts", 0),
        ("glm4_moe", "n_shared_experts", 0),
        ("glm4_moe", "head_dim", None),
        ("glm4_moe", "tie_word_embeddings", True),
        ("glm4_moe", "partial_rotary_factor", 0.3),  # 9 of 32
        ("glm4_moe", "partial_rotary_factor", 1.5),
        ("glm4_moe_lite", "scoring_func", "softmax"),
        ("glm4_moe_lite", "topk_method", "greedy"),
        ("glm4_moe_lite", "moe_layer_freq", 2),
        ("glm4_moe_lite", "n_shared_experts", 0),
        ("glm4_moe_lite", "first_k_dense_replace", 2),
        ("glm4_moe_lite", "first_k_dense_replace", None),
        ("glm4_moe_lite", "mlp_layer_types", ["sparse", "dense", "sparse"]),
        ("glm4_moe_lite", "tie_word_embeddings", True),
        ("minimax_m2", "rotary_dim", None),
        ("minimax_m2", "scoring_func", "softmax"),
        ("minimax_m2", "scoring_func", None),
        ("minimax_m2", "use_routing_bias", False),
        ("minimax_m2", "attn_type_list", [1, 0]),
        ("minimax_m2", "router_jitter_noise", 0.1),
        ("minimax_m2", "tie_word_embeddings", True),
        ("minimax_m2", "partial_rotary_factor", 0.25),
        ("seed_oss", "attention_out_bias", True),
        ("seed_oss", "mlp_bias", True),
        ("smollm3", "use_sliding_window", True),
        ("smollm3", "no_rope_layers", [1, 0]),
        ("smollm3", "mlp_bias", True),
        ("ernie4_5", "use_bias", True),
        ("gpt_oss", "swiglu_alpha", 1.0),
        ("gpt_oss", "swiglu_limit", 6.0),
        ("gpt_oss", "rms_norm_eps", 1e-6),
        ("gpt_oss", "tie_word_embeddings", True),
        ("gpt_oss", "sliding_window", None),
        ("gpt_oss", "layer_types", ["full_attention", "sliding_attention"] * 2),
        ("gpt_oss", "layer_types", ["sliding_attention"] * 4),
    ],
)
def test_what_a_family_does_not_have_is_refused_by_name(name: str, field: str, value: object) -> None:
    assert list(refused({**TINY[name], field: value})) == [field]


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("hidden_size", "64", "is no integer"),
        ("hidden_size", True, "is no integer"),
        ("hidden_size", 64.0, "is no integer"),
        ("hidden_size", None, "is null"),
        ("rms_norm_eps", "1e-6", "is no number"),
        ("tie_word_embeddings", 1, "is no boolean"),
        ("rope_scaling", "yarn", "is no mapping"),
        ("num_attention_heads", 0, "must be positive"),
        ("num_key_value_heads", 3, "does not divide"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_name(field: str, value: object, problem: str) -> None:
    refusals = refused({**TINY["llama"], field: value})
    assert list(refusals) == [field] and problem in refusals[field].problem


def test_everything_wrong_is_said_at_once() -> None:
    wrong = {"attention_bias": True, "logit_scale": 2, "hidden_size": "x", "mlp_bias": True, "hidden_act": "gelu"}
    with pytest.raises(ConfigError, match="5 problems") as raised:
        model_of({**TINY["llama"], **wrong})
    assert {violation.key for violation in raised.value.violations} == {f"config.json: {field}" for field in wrong}
    assert "config.json: attention_bias=true: adds biases" in str(raised.value)


def test_integers_pass_for_floats_and_nulls_for_what_is_optional() -> None:
    _, plain = model_of(TINY["llama"])
    _, model = model_of({**TINY["llama"], "rope_theta": 500000, "num_key_value_heads": None, "head_dim": None})
    assert model.rotary_base == plain.rotary_base and isinstance(model.rotary_base, float)
    assert (model.num_query_groups, model.head_dim) == (4, 16)


def test_gemma_3_has_a_rope_for_each_kind_of_layer_in_either_spelling() -> None:
    older = {key: value for key, value in TINY["gemma3_text"].items() if not key.startswith("rope")}
    both = {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    }
    assert model_of({**older, "rope_parameters": both}) == model_of(TINY["gemma3_text"])
    assert list(refused({**older, "rope_parameters": both, "rope_theta": 3.0})) == ["rope_theta"]
    assert list(refused({**older, "rope_parameters": both, "rope_scaling": {"rope_type": "default"}})) == [
        "rope_scaling"
    ]
    stretched = {**both, "sliding_attention": {"rope_type": "linear", "factor": 2.0}}
    assert list(refused({**older, "rope_parameters": stretched})) == ["rope_parameters.sliding_attention.rope_type"]
    assert list(refused({**older, "rope_parameters": {"rope_type": "default"}})) == ["rope_parameters.rope_type"]
    _, plain = model_of({**older, "layer_types": ["full_attention"] * 6})
    assert plain.sliding_layers == [] and plain.local_rotary_base is None


@pytest.mark.parametrize("name", FAMILIES)
def test_another_name_of_the_length_may_not_be_less(name: str) -> None:
    """vLLM takes the least of them."""
    longest = TINY[name]["max_position_embeddings"]
    for other in ("max_sequence_length", "seq_length", "seq_len", "model_max_length"):
        assert model_of({**TINY[name], other: longest})[1] == model_of(TINY[name])[1]
        refusals = refused({**TINY[name], other: longest - 1})
        assert list(refusals) == [other] and "vLLM draws no longer sequence" in refusals[other].problem


def test_windows() -> None:
    def window(name: str, **changes: object) -> tuple[int | None, list[int]]:
        _, model = model_of({**TINY[name], **changes})
        return model.sliding_window, model.sliding_layers

    assert window("mistral") == (24, [0, 1])
    assert window("mistral", sliding_window=None) == (None, [])
    without = {key: value for key, value in TINY["mistral"].items() if key != "sliding_window"}
    assert model_of(without)[1].sliding_window == 4096  # as MistralConfig has it
    assert window("mixtral", sliding_window=8) == (8, [0, 1])
    assert window("gemma2") == (24, [0, 2])
    assert window("gemma2", layer_types=["full_attention"] * 3 + ["sliding_attention"]) == (24, [3])
    for name, layers in (("qwen2", [0, 1]), ("qwen3", [0, 1])):
        assert window(name, use_sliding_window=True, sliding_window=24, max_window_layers=0) == (24, layers)
        assert window(name, use_sliding_window=True, sliding_window=None, max_window_layers=0) == (None, [])
        mixed = {**TINY[name], "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
        assert list(refused(mixed)) == ["use_sliding_window"]
    every_other = {**TINY["qwen2_moe"], "use_sliding_window": True}
    assert "layers [0]" in refused(every_other)["use_sliding_window"].problem


def test_dense_layers() -> None:
    def dense(name: str, **changes: object) -> list[int]:
        _, model = model_of({**TINY[name], **changes})
        assert model.moe is not None
        return model.moe.dense_layers

    assert dense("qwen3_moe", mlp_only_layers=[], decoder_sparse_step=2) == [0, 2]
    assert dense("qwen3_moe", mlp_only_layers=[1], decoder_sparse_step=2, num_hidden_layers=4) == [0, 1, 2]
    assert dense("qwen2_moe") == [1]
    assert dense("deepseek_v3", first_k_dense_replace=2) == [0, 1]
    assert list(refused({**TINY["qwen3_moe"], "decoder_sparse_step": 0})) == ["decoder_sparse_step"]


@pytest.mark.parametrize("method", ["fp8", "gptq", "awq", "bitsandbytes"])
def test_quantised_weights_are_refused_but_for_fp8_in_blocks(method: str) -> None:
    quantised = {"quant_method": method, "weight_block_size": [128, 128]}
    for name in ("llama", "qwen3_moe", "deepseek_v3"):
        refusals = refused({**TINY[name], "quantization_config": quantised})
        assert list(refusals) == ([] if method == "fp8" else ["quantization_config"])
        for refusal in refusals.values():
            assert method in refusal.problem and "dequantise" in refusal.remedy
    for other in ({"quant_method": "fp8"}, quantised | {"fmt": "e5m2"}, {"producer": {"name": "modelopt"}}):
        assert list(refused({**TINY["llama"], "quantization_config": other})) == ["quantization_config"]
    wide = {**FACTS["deepseek-ai/DeepSeek-V3"]["quantization_config"], "weight_block_size": [64, 64]}
    assert list(refused({**TINY["deepseek_v3"], "quantization_config": wide})) == ["quantization_config"]


def test_mxfp4_is_of_gpt_oss_alone() -> None:
    quantised = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    assert model_of({**TINY["gpt_oss"], **quantised}) == model_of(TINY["gpt_oss"])
    assert list(refused({**TINY["mixtral"], **quantised})) == ["quantization_config"]
    assert list(refused({**TINY["gpt_oss"], "quantization_config": {"quant_method": "mxfp8"}})) == [
        "quantization_config"
    ]


def test_gpt_oss_has_yarn_as_vllm_reads_it() -> None:
    def rope(**changes: object) -> dict[str, Any]:
        return {**TINY["gpt_oss"], "rope_scaling": {**TINY["gpt_oss"]["rope_scaling"], **changes}}

    for field, value in (("rope_type", "linear"), ("attention_factor", 1.2), ("beta_fast", None), ("mscale", 1.0)):
        assert list(refused(rope(**{field: value}))) == [f"rope_scaling.{field}"], field
    _, default = model_of({name: value for name, value in TINY["gpt_oss"].items() if name != "rope_scaling"})
    assert (default.rope.factor, default.rope.truncate, default.rope.beta_fast) == (32.0, False, 32.0)


@pytest.mark.parametrize("architectures", [None, [], "LlamaForCausalLM", ["LlamaModel"], ["A", "B"], [["A"]]])
def test_an_unsupported_architecture_lists_the_supported(architectures: object) -> None:
    violation = refused({**TINY["llama"], "architectures": architectures})["architectures"]
    assert all(family.architectures[0] in violation.remedy for family in FAMILIES.values())


def test_a_classifier_has_the_decoder_of_its_family() -> None:
    classifier = {**TINY["llama"], "architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
    assert model_of(classifier) == model_of(TINY["llama"])
    assert "architectures" in refused({**TINY["llama"], "architectures": ["BertForSequenceClassification"]})


def test_a_contradiction_has_a_remedy_of_its_own() -> None:
    contradiction = refused({**TINY["llama"], "model_type": "mistral"})
    assert "llama" in contradiction["model_type"].remedy


def test_the_lists_know_what_every_configuration_of_transformers_has() -> None:
    assert set(PreTrainedConfig().to_dict()) <= IGNORED | set(NEUTRAL)
    assert set(GenerationConfig._get_default_generation_params()) <= IGNORED
    assert not IGNORED & set(NEUTRAL)


def test_true_is_not_one() -> None:
    assert same(0, 0.0) and same(True, True) and not same(1, True) and not same(False, 0)
    fields = Fields({"x": True})
    fields.demand("x", 1, because="differs")
    assert [violation.value for violation in fields.violations] == ["true"]


def test_empty_parts_change_nothing() -> None:
    nothing = {"text_config": None, "vision_config": {}, "audio_config": None}
    for name in ("llama", "qwen3_moe", "gpt_oss"):
        assert model_of({**TINY[name], **nothing}) == model_of(TINY[name])
