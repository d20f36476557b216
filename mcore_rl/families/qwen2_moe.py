"""Qwen1.5-MoE and Qwen2-57B-A14B: Qwen2's attention, experts, and a gated shared expert."""

from __future__ import annotations

from mcore_rl.config.model import ModelConfig, MoeConfig
from mcore_rl.families import qwen2
from mcore_rl.families.blocks import HF_MLP, LAYER, Tables, alike, experts, gated_mlp
from mcore_rl.families.decoder import Defaults, demand_plain_heads, read_decoder, read_dense_layers, window_some_layers
from mcore_rl.families.family import Family
from mcore_rl.families.fields import Fields
from mcore_rl.families.rules import Axis, Layers, Rule, hf


def gated_shared_expert(axis: Axis) -> Tables:
    """An expert that all tokens share, with a gate.  axis: vLLM's."""
    gate = Rule(
        LAYER + "mlp.shared_experts.gate_weight",
        (hf(HF_MLP + "shared_expert_gate.weight", "one", "hidden"),),
        layers=Layers.experts,
    )
    mlp = gated_mlp(LAYER + "mlp.shared_experts.", HF_MLP + "shared_expert.", "shared_ffn", Layers.experts, axis)
    return mlp + alike(gate)


DEFAULTS = Defaults(
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=24,
    num_attention_heads=16,
    num_key_value_heads=16,
    max_position_embeddings=32768,
)
EXPERTS = MoeConfig(num_experts=60, top_k=4, ffn_hidden_size=1408, shared_ffn_hidden_size=5632)


def read(fields: Fields) -> ModelConfig:
    """Reads ``Qwen2MoeConfig``: windows, if on, are in every other layer before ``max_window_layers``."""
    model = read_decoder(fields, DEFAULTS)
    demand_plain_heads(fields, model)
    full = fields.take("max_window_layers", int, 28)
    window_some_layers(fields, model, [layer for layer in range(0, model.num_layers, 2) if layer < full])
    fields.demand("qkv_bias", True, because="leaves out the biases of queries, keys and values")
    model.qkv_bias = True
    model.moe = read_experts(fields, EXPERTS)
    model.moe.norm_topk_prob = fields.take("norm_topk_prob", bool, False)
    model.moe.dense_layers = read_dense_layers(fields, model.num_layers)
    return model


def read_experts(fields: Fields, defaults: MoeConfig) -> MoeConfig:
    """Experts beside a gated one that all tokens share.  defaults: those of the configuration class."""
    shared = fields.take("shared_expert_intermediate_size", int, defaults.shared_ffn_hidden_size)
    if shared < 1:
        fields.refuse("shared_expert_intermediate_size", "this family has a shared expert", "Write 1 or more")
    return MoeConfig(
        num_experts=fields.take("num_experts", int, defaults.num_experts),
        top_k=fields.take("num_experts_per_tok", int, defaults.top_k),
        ffn_hidden_size=fields.take("moe_intermediate_size", int, defaults.ffn_hidden_size),
        shared_ffn_hidden_size=shared,
        shared_gate=shared > 0,
    )


TABLES = qwen2.TABLES + experts(HF_MLP) + gated_shared_expert(Axis.tensor)

FAMILY = Family(
    name="qwen2_moe",
    architectures=("Qwen2MoeForCausalLM",),
    model_type="qwen2_moe",
    read=read,
    weights=TABLES.weights,
    rollout=TABLES.rollout,
)
