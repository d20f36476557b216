"""Keys as Megatron-core, Megatron-LM and Megatron-Bridge write them, spelled out."""

from __future__ import annotations

import pytest

from mcore_rl.checkpoints.megatron_checkpoint import Name, StoredKeys, TensorLocation, is_adapter, parse

LAYER = "decoder.layers.{l}."
NORM = LAYER + "input_layernorm.weight"
FC1 = LAYER + "mlp.experts.local_experts.{e}.linear_fc1.weight"


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("embedding.word_embeddings.weight", Name("embedding.word_embeddings.weight", None, None)),
        ("module.model.output_layer.weight", Name("output_layer.weight", None, None)),
        ("decoder.layers.12.mlp.linear_fc2.weight", Name(LAYER + "mlp.linear_fc2.weight", 12, None)),
        ("model.decoder.layers.mlp.linear_fc2.weight", Name(LAYER + "mlp.linear_fc2.weight", None, None)),
        ("decoder.layers.0.self_attention.linear_qkv.layer_norm_weight", Name(NORM, 0, None)),
        ("decoder.layers.mlp.linear_fc1.layer_norm_weight", Name(LAYER + "pre_mlp_layernorm.weight", None, None)),
        ("decoder.layers.3.mlp.experts.experts.linear_fc1.weight", Name(FC1, 3, None)),
        ("decoder.layers.mlp.experts.experts.linear_fc1.weight", Name(FC1, None, None)),
        ("decoder.layers.3.mlp.experts.experts.7.linear_fc1.weight", Name(FC1, 3, 7)),
        ("decoder.layers.3.mlp.experts.linear_fc1.weight7", Name(FC1, 3, 7)),
        ("decoder.layers.3.mlp.experts.local_experts.7.linear_fc1.weight", Name(FC1, 3, 7)),
    ],
)  # fmt: skip
def test_what_a_key_speaks_of(key: str, name: Name) -> None:
    assert parse(key) == name


@pytest.mark.parametrize(
    "key",
    [
        "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight",
        "chained_1.optimizer.state.fp32_param.decoder.layers.mlp.experts.experts.linear_fc1.weight",
        "rng_state/shard_0_1",
        "decoder.layers.self_attention.linear_qkv._extra_state/shard_0_4",
        "module.decoder.final_layernorm._extra_state",
        "mtp.layers.0.eh_proj.weight",
    ],
)
def test_what_is_no_weight_of_the_model(key: str) -> None:
    assert parse(key) is None
    assert not is_adapter(key)


def test_where_a_tensor_is() -> None:
    single = StoredKeys(["decoder.layers.0.mlp.experts.experts.linear_fc1.weight"])
    assert single.find(FC1, 0, 5) == TensorLocation("decoder.layers.0.mlp.experts.experts.linear_fc1.weight", (5,))
    assert single.find(FC1, 1, 5) is None
    assert (single.stacked, single.num_layers_named) == (False, 1)
    stacked = StoredKeys(["module.decoder.layers.mlp.experts.experts.linear_fc1.weight"])
    assert stacked.find(FC1, 2, 5) == TensorLocation(
        "module.decoder.layers.mlp.experts.experts.linear_fc1.weight", (2, 5)
    )
    assert (stacked.stacked, stacked.num_layers_named) == (True, 0)
    apart = StoredKeys(["decoder.layers.2.mlp.experts.experts.5.linear_fc1.weight"])
    assert apart.find(FC1, 2, 5) == TensorLocation("decoder.layers.2.mlp.experts.experts.5.linear_fc1.weight", ())
    assert StoredKeys(["output_layer.weight"]).find("output_layer.weight", None, None) == TensorLocation(
        "output_layer.weight", ()
    )


def test_adapters_are_told_apart() -> None:
    assert is_adapter("decoder.layers.self_attention.linear_qkv.adapter.linear_in.weight")
    assert is_adapter("decoder.layers.0.mlp.linear_fc1.lora_A.weight")
    assert not is_adapter("decoder.layers.0.mlp.linear_fc1.weight")
