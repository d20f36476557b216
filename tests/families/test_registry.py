"""Every published and every tiny configuration, against transformers: models, names, shapes, counts and defaults."""

from __future__ import annotations

import inspect
import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from safetensors import safe_open
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from mcore_rl.checkpoints.stacked import stored_tensors
from mcore_rl.config.model import Activation, ModelConfig, RopeType
from mcore_rl.families.registry import FAMILIES, model_of
from mcore_rl.ground.errors import ConfigError
from mcore_rl.proofs.effective_config import neighbours_rotate
from mcore_rl.weights.table import Table
from tests.support.published import FACTS, TINY, WRITTEN, class_config, meta_model, saved_shapes

# As the model cards and safetensors indices count; DeepSeek-V3, GLM-4.5 and GLM-4.7-Flash without the multi-token
# prediction layer (with it GLM-4.5 has 358,337,791,296, Air 110,468,824,832, and Flash 31,221,488,576).  MiniMax-M2.5
# without the 13,880,064 scales of its fp8 blocks.  Of Qwen3.5 the language model: with the prediction layer and the
# tower 27B has 27,781,427,952, and 35B-A3B 35,951,822,704.
# Moonlight's is published in four digits: 15.29e9 without embedding and output, 671,088,640 more.
PUBLISHED_PARAMETERS = {
    "google/gemma-3-1b-it": 999_885_952,
    "google/gemma-2-2b-it": 2_614_341_888,
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen2.5-3B-Instruct": 3_085_938_688,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-14B-Instruct": 14_770_033_664,
    "Qwen/Qwen2.5-32B-Instruct": 32_763_876_352,
    "Qwen/Qwen2.5-72B-Instruct": 72_706_203_648,
    "Qwen/Qwen2-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-Math-7B": 7_615_616_512,
    "PRIME-RL/Eurus-2-7B-SFT": 7_615_616_512,  # of Qwen2.5-Math-7B
    "deepseek-ai/deepseek-llm-7b-chat": 6_910_365_696,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "mistralai/Mistral-7B-Instruct-v0.1": 7_241_732_096,
    "mistralai/Mixtral-8x7B-Instruct-v0.1": 46_702_792_704,
    "mistralai/Mixtral-8x22B-Instruct-v0.1": 140_630_071_296,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "Qwen/Qwen2.5-VL-7B-Instruct": 7_615_616_512,  # the language model, which is Qwen2.5-7B's; 8,292,166,656 in all
    "Qwen/Qwen3-VL-30B-A3B-Instruct": 30_532_122_624,  # as above, Qwen3-30B-A3B's; 31,070,754,032 in all
    "Qwen/Qwen3-Next-80B-A3B-Instruct": 79_674_391_296,
    "Qwen/Qwen3.5-27B": 26_895_998_464,
    "Qwen/Qwen3.5-35B-A3B": 34_660_610_688,
    "Qwen/Qwen1.5-MoE-A2.7B-Chat": 14_315_784_192,
    "microsoft/Phi-3-mini-4k-instruct": 3_821_079_552,
    "microsoft/phi-4": 14_659_507_200,
    "microsoft/Phi-4-mini-instruct": 3_836_021_760,
    "allenai/OLMoE-1B-7B-0924-Instruct": 6_919_161_856,
    "deepseek-ai/DeepSeek-V3": 671_026_419_200,
    "deepseek-ai/DeepSeek-V2": 235_741_434_880,
    "deepseek-ai/DeepSeek-V2-Lite": 15_706_484_224,
    "moonshotai/Moonlight-16B-A3B": 15_960_110_208,
    "moonshotai/Kimi-K2-Instruct": 1_026_408_232_448,
    "openai/gpt-oss-20b": 20_914_757_184,
    "openai/gpt-oss-120b": 116_829_156_672,
    "zai-org/GLM-4.5": 352_797_829_024,
    "zai-org/GLM-4.5-Air": 106_852_251_264,
    "zai-org/GLM-4.7-Flash": 29_943_393_920,
    "MiniMaxAI/MiniMax-M2.5": 228_689_764_864,
    "ByteDance-Seed/Seed-OSS-36B-Instruct": 36_151_104_512,
    "HuggingFaceTB/SmolLM3-3B": 3_075_098_624,
    "baidu/ERNIE-4.5-0.3B-PT": 360_748_032,
}


ACTIVATIONS = {Activation.silu: "SiLUActivation", Activation.gelu_tanh: "GELUTanh"}


def shapes(facts: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: info.shape for name, info in stored_tensors(Table(*model_of(facts))).items()}


def test_every_checkpoint_has_a_published_count() -> None:
    assert set(PUBLISHED_PARAMETERS) == {hf_id for hf_id in FACTS if not hf_id.startswith("tiny-")}
    assert set(TINY) == set(FAMILIES)


@pytest.mark.parametrize("hf_id", PUBLISHED_PARAMETERS)
def test_the_table_counts_as_the_publisher_does(hf_id: str) -> None:
    assert sum(prod(shape) for shape in shapes(FACTS[hf_id]).values()) == PUBLISHED_PARAMETERS[hf_id]


@pytest.mark.parametrize("hf_id", FACTS)
def test_the_table_and_the_model_are_those_of_transformers(hf_id: str) -> None:
    facts = FACTS[hf_id]
    reference = meta_model(facts)
    assert shapes(facts) == saved_shapes(reference)
    family, model = model_of(facts)
    assert FAMILIES[family.name] is family and facts["model_type"] in (family.model_type, *family.other_model_types)
    assert_same_numbers(model, reference.model, reference.config)


@pytest.mark.parametrize(
    ("hf_id", "left_out"),
    [
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", 1_650_471_424),
        ("Qwen/Qwen3.5-27B", 424_699_392),
        ("Qwen/Qwen3.5-35B-A3B", 844_640_768),
    ],
)
def test_what_is_left_out_is_the_layer_of_multi_token_prediction(hf_id: str, left_out: int) -> None:
    """The published checkpoint has so many parameters beyond the model's, in tensors of these names."""
    family, model = model_of(FACTS[hf_id])
    sizes = {tensor.name: prod(tensor.shape(model)) for rule in family.weights for tensor in rule.hf}
    hidden = model.hidden_size
    joining = {"fc": 2 * hidden**2, "norm": hidden, "pre_fc_norm_embedding": hidden, "pre_fc_norm_hidden": hidden}
    sizes |= {f"model.{name}.weight": size for name, size in joining.items()}
    assert len(set(family.ignored)) == len(family.ignored)
    names = [name for name in family.ignored if not name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    total = sum(
        sizes[name.replace("mtp.", "model.", 1)] * (model.moe.num_experts if model.moe and "{e}" in name else 1)
        for name in names
    )
    assert total == left_out


def assert_same_rotation(model: ModelConfig, embedding: Any, parameters: dict[str, Any]) -> None:
    """Bases, factors and widths of the rotation, for Gemma 3 of both kinds of layers."""
    if "full_attention" not in parameters:
        kinds = [("", model.rotary_base, parameters)]
    else:
        bases = {"full_attention": model.rotary_base, "sliding_attention": model.local_rotary_base}
        kinds = [(f"{kind}_", base, parameters[kind]) for kind, base in bases.items()]
    for prefix, base, values in kinds:
        assert getattr(embedding, f"{prefix}attention_scaling") == model.rope.attention_factor
        assert values["rope_theta"] == base
        assert 2 * getattr(embedding, f"{prefix}inv_freq").numel() == model.rotary_dim


def assert_same_linear_attention(model: ModelConfig, net: Any) -> None:
    """The numbers of heads and their widths, of which shapes show products alone."""
    linear = model.linear_attention
    assert linear is not None
    assert (net.num_k_heads, net.head_k_dim) == (linear.num_key_heads, linear.key_head_dim)
    assert (net.num_v_heads, net.head_v_dim) == (linear.num_value_heads, linear.value_head_dim)
    assert net.conv_kernel_size == linear.conv_kernel_dim
    assert (net.activation, net.norm.variance_epsilon) == ("silu", model.norm_epsilon)


def assert_same_numbers(model: ModelConfig, reference: Any, config: Any) -> None:
    """What transformers' modules made of the configuration, where no weight's shape tells."""
    assert config.tie_word_embeddings == model.tie_output
    longest = config.max_position_embeddings
    if model.rope.type is RopeType.longrope:  # beyond it the frequencies are others
        longest = config.original_max_position_embeddings
        assert model.rope.short_factor == config.rope_parameters["short_factor"]
    assert longest == model.max_position_embeddings
    assert_same_rotation(model, reference.rotary_emb, config.rope_parameters)
    scale = model.head_dim**-0.5 if model.softmax_scale is None else model.softmax_scale
    whole_model = config.sliding_window if config.model_type in ("mistral", "mixtral", "phi3") else None
    embedding = reference.embed_tokens
    assert model.embedding_scale == (embedding.scalar_embed_scale if hasattr(embedding, "embed_scale") else 1.0)
    assert model.zero_centered_norm == ("(1.0 + self.weight" in inspect.getsource(type(reference.norm)))
    assert model.sandwich_norm == hasattr(reference.layers[0], "post_feedforward_layernorm")
    for layer, block in enumerate(reference.layers):
        assert model.is_linear(layer) == hasattr(block, "linear_attn")
        if model.is_linear(layer):
            assert_same_linear_attention(model, block.linear_attn)
        else:
            window, attention = model.sliding_window if layer in model.sliding_layers else None, block.self_attn
            assert attention.scaling == pytest.approx(scale, rel=1e-15)
            assert bool(getattr(attention, "use_rope", True)) == (layer not in model.no_rope_layers)
            assert model.mla is not None or neighbours_rotate(attention) == model.rotary_interleaved
            assert getattr(attention, "sliding_window", whole_model) == window
            assert (attention.o_proj.bias is not None) == model.linear_bias
            assert hasattr(attention, "sinks") == model.attention_sinks
        assert hasattr(block.mlp, "experts") == model.has_experts(layer)
        mlp = block.mlp.experts if model.has_experts(layer) else block.mlp
        if model.activation is Activation.quick_gelu:  # written into the experts, with Megatron's alpha
            assert (mlp.alpha, mlp.limit) == (1.702, model.activation_clamp)
        else:
            gate = mlp.activation_fn if hasattr(mlp, "activation_fn") else mlp.act_fn
            assert type(gate).__name__ == ACTIVATIONS[model.activation]
            assert model.activation_clamp is None and not model.glu_linear_offset
        norm = block.input_layernorm
        assert (norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps) == model.norm_epsilon


@pytest.mark.parametrize("hf_id", FACTS)
def test_what_transformers_5_writes_reads_the_same(hf_id: str) -> None:
    """It spells out every default, rope_parameters and layer_types."""
    written = class_config(FACTS[hf_id]).to_dict()
    assert model_of(json.loads(json.dumps(written, default=str))) == model_of(FACTS[hf_id])


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_left_out_has_the_default_of_the_class(name: str) -> None:
    heading = {"architectures": list(FAMILIES[name].architectures), "model_type": name} | WRITTEN.get(name, {})
    written = CONFIG_MAPPING[name](**heading).to_dict()
    assert model_of(heading) == model_of(written)
    assert shapes(heading) == saved_shapes(meta_model(heading))


def outcome(facts: dict[str, Any]) -> object:
    """The model, or what it is refused for: sizes may not go with the default of the one that is left out."""
    try:
        return model_of(facts)
    except ConfigError as error:
        return sorted(violation.key for violation in error.violations)


@pytest.mark.parametrize("name", FAMILIES)
def test_any_one_field_left_out_has_the_default_of_the_class(name: str) -> None:
    for field in set(TINY[name]) - {"architectures", "model_type", "hidden_size", "num_hidden_layers"}:
        facts = {key: value for key, value in TINY[name].items() if key != field}
        try:
            written = json.loads(json.dumps(class_config(facts).to_dict(), default=str))
        except StrictDataclassClassValidationError:  # transformers refuses what is left, and so must we
            assert isinstance(outcome(facts), list), field
        else:
            assert outcome(facts) == outcome(written), field


@pytest.mark.parametrize("name", FAMILIES)
def test_a_saved_checkpoint_holds_the_tables_tensors(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(class_config(TINY[name])).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        saved = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    assert shapes(TINY[name]) == saved
    assert model_of(json.loads((tmp_path / "config.json").read_text())) == model_of(TINY[name])
