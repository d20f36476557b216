"""Transformer Engine's names, adapters and extra state, as Megatron-core writes them, to canonical ones."""

from __future__ import annotations

import pytest

from mcore_rl.weights.names import canonical


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("decoder.layers.3.self_attention.linear_qkv.layer_norm_weight", "decoder.layers.3.input_layernorm.weight"),
        ("decoder.layers.0.mlp.linear_fc1.layer_norm_weight", "decoder.layers.0.pre_mlp_layernorm.weight"),
        (
            "decoder.layers.0.mlp.experts.linear_fc1.weight11",
            "decoder.layers.0.mlp.experts.local_experts.11.linear_fc1.weight",
        ),
        (
            "decoder.layers.1.mlp.experts.linear_fc2.weight0",
            "decoder.layers.1.mlp.experts.local_experts.0.linear_fc2.weight",
        ),
        (
            "decoder.layers.1.self_attention.linear_q_up_proj.layer_norm_weight",
            "decoder.layers.1.self_attention.q_layernorm.weight",
        ),
        (
            "decoder.layers.1.self_attention.linear_kv_up_proj.layer_norm_weight",
            "decoder.layers.1.self_attention.kv_layernorm.weight",
        ),
        (
            "decoder.layers.1.self_attention.linear_qkv.to_wrap.weight",
            "decoder.layers.1.self_attention.linear_qkv.weight",
        ),
        ("decoder.layers.1.mlp.linear_fc2.base_layer.weight", "decoder.layers.1.mlp.linear_fc2.weight"),
        (
            "decoder.layers.1.self_attention.linear_qkv.to_wrap.layer_norm_weight",
            "decoder.layers.1.input_layernorm.weight",
        ),
        ("decoder.layers.1.self_attention.linear_qkv.adapter.linear_in.weight", None),
        ("decoder.layers.1.mlp.linear_fc1.lora_A.default.weight", None),
        ("decoder.layers.1.self_attention.linear_qkv._extra_state", None),
    ],
)
def test_other_spellings(key: str, name: str | None) -> None:
    assert canonical(key) == name


@pytest.mark.parametrize(
    "name",
    [
        "embedding.word_embeddings.weight",
        "output_layer.weight",
        "decoder.final_layernorm.weight",
        "decoder.layers.0.input_layernorm.weight",
        "decoder.layers.0.self_attention.linear_qkv.bias",
        "decoder.layers.0.mlp.experts.local_experts.11.linear_fc1.weight",
        "decoder.layers.0.mlp.shared_experts.linear_fc1.weight",
        "decoder.layers.0.mlp.router.expert_bias",
    ],
)
def test_canonical_names_stay(name: str) -> None:
    assert canonical(name) == name
