"""Qwen1.5-MoE and Qwen2-57B-A14B: Qwen2's attention, experts, and a gated shared expert."""

from __future__ import annotations

from mcore_rl.config.model import ModelConfig, MoeConfig
from mcore_rl.families import rollout_blocks as rollout
from mcore_rl.families.blocks import (
    DENSE_MLP,
    ENDS,
    GROUPED_ATTENTION,
    HF_MLP,
    LAYER,
    NORMS,
    QKV_BIAS,
    experts,
    gated_mlp,
)
from mcore_rl.families.decoder import Defaults, read_decoder, read_dense_layers, window_some_layers
from mcore_rl.families.family import Family
from mcore_rl.families.fields import Fields
from mcore_rl.families.rules import Layers, Rule, hf

SHARED = (
    *gated_mlp(LAYER + "mlp.shared_experts.", HF_MLP + "shared_expert.", "shared_ffn", Layers.experts),
    Rule(
        LAYER + "mlp.shared_experts.gate_weight",
        (hf(HF_MLP + "shared_expert_gate.weight", "one", "hidden"),),
        layers=Layers.experts,
    ),
)

DEFAULTS = Defaults(
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=24,
    num_attention_heads=16,
    num_key_value_heads=16,
    max_position_embeddings=32768,
)


def read(fields: Fields) -> ModelConfig:
    """Reads ``Qwen2MoeConfig``: windows, if on, are in every other layer before ``max_window_layers``."""
    model = read_decoder(fields, DEFAULTS)
    width = model.hidden_size // max(model.num_attention_heads, 1)
    fields.demand("head_dim", width, None, because=f"is not {width}, as vLLM 0.32 takes it to be")
    full = fields.take("max_window_layers", int, 28)
    window_some_layers(fields, model, [layer for layer in range(0, model.num_layers, 2) if layer < full])
    fields.demand("qkv_bias", True, because="leaves out the biases of queries, keys and values")
    model.qkv_bias = True
    shared = fields.take("shared_expert_intermediate_size", int, 5632)
    if shared < 1:
        fields.refuse("shared_expert_intermediate_size", "this family has a shared expert", "Write 1 or more")
    model.moe = MoeConfig(
        num_experts=fields.take("num_experts", int, 60),
        top_k=fields.take("num_experts_per_tok", int, 4),
        ffn_hidden_size=fields.take("moe_intermediate_size", int, 1408),
        norm_topk_prob=fields.take("norm_topk_prob", bool, False),
        dense_layers=read_dense_layers(fields, model.num_layers),
        shared_ffn_hidden_size=shared,
        shared_gate=shared > 0,
    )
    return model


WEIGHTS = (*ENDS, *NORMS, *GROUPED_ATTENTION, *QKV_BIAS, *DENSE_MLP, *experts(HF_MLP), *SHARED)
ROLLOUT = (
    *rollout.ENDS,
    *rollout.NORMS,
    *rollout.GROUPED_ATTENTION,
    *rollout.QKV_BIAS,
    *rollout.DENSE_MLP,
    *rollout.experts(HF_MLP),
    *rollout.gated_mlp(HF_MLP + "shared_expert.", "shared_ffn", Layers.experts),
    rollout.same(hf(HF_MLP + "shared_expert_gate.weight", "one", "hidden"), Layers.experts),
)

FAMILY = Family(
    name="qwen2_moe",
    architectures=("Qwen2MoeForCausalLM",),
    model_type="qwen2_moe",
    read=read,
    weights=WEIGHTS,
    rollout=ROLLOUT,
)
