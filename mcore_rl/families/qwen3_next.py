"""Qwen3-Next: a gated delta net in most layers, gated attention in the others, experts and a gated shared expert.

The layer of multi-token prediction (``mtp.*``) is left out: it is not part of the policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mcore_rl.config.model import LinearAttentionConfig, ModelConfig, MoeConfig
from mcore_rl.families import qwen2_moe
from mcore_rl.families.blocks import (
    ATTENTION,
    DENSE_MLP,
    ENDS,
    HF_ATTENTION,
    HF_LAYER,
    HF_MLP,
    INPUT_NORM,
    NORMS,
    OUTPUT_PROJECTION,
    PRE_MLP_NORM,
    QK_NORM,
    Tables,
    alike,
    experts,
    of_vllm,
)
from mcore_rl.families.decoder import LINEAR, Defaults, demand_untied, read_decoder, read_dense_layers, read_layer_types
from mcore_rl.families.family import Family
from mcore_rl.families.fields import Fields
from mcore_rl.families.rope import Reader
from mcore_rl.families.rules import (
    Axis,
    Layers,
    Rule,
    Sections,
    Stage,
    delta_projections,
    gated_grouped_qkv,
    hf,
    replicated_qkv,
    split,
)

HF_LINEAR = HF_LAYER + "linear_attn."
DEFAULTS = Defaults(
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=48,
    num_attention_heads=16,
    num_key_value_heads=2,
    head_dim=256,
    max_position_embeddings=32768,
)
EXPERTS = MoeConfig(num_experts=512, top_k=10, ffn_hidden_size=512, shared_ffn_hidden_size=512)
PARTIAL_ROTARY_FACTOR = 0.25  # the class's default
INTERVAL = 4  # likewise


def read(fields: Fields) -> ModelConfig:
    """Reads the fields of ``Qwen3NextConfig``."""
    model = read_hybrid(fields, DEFAULTS)
    demand_untied(fields)
    model.moe = qwen2_moe.read_experts(fields, EXPERTS)
    model.moe.norm_topk_prob = fields.take("norm_topk_prob", bool, True)
    model.moe.dense_layers = read_dense_layers(fields, model.num_layers)
    return model


def read_hybrid(fields: Fields, defaults: Defaults, kinds: Mapping[str, Reader] | None = None) -> ModelConfig:
    """The sizes, norms and both kinds of attention of Qwen3-Next and Qwen3.5; the family adds its experts.

    Without ``layer_types``, every ``full_attention_interval``-th layer attends.  kinds: of ``read_rope``.
    """
    model = read_decoder(fields, defaults, partial_rotary_factor=PARTIAL_ROTARY_FACTOR, kinds=kinds)
    fields.demand("use_sliding_window", False, because="limits attention to a window")
    fields.ignore("sliding_window", "max_window_layers")
    fields.demand("attn_output_gate", True, because="leaves out the gate of attention in vLLM alone")
    fields.demand("output_gate_type", "silu", "swish", because="gates linear attention otherwise in vLLM alone")
    fields.demand("layer_scale", False, because="scales what layers add in vLLM alone")
    fields.demand("is_causal", True, because="lets tokens see those behind them in vLLM alone")
    model.qk_norm = model.zero_centered_norm = model.attention_output_gate = True
    interval = fields.take("full_attention_interval", int, INTERVAL)
    if interval < 1:
        fields.refuse("full_attention_interval", "one in so many layers attends", "Write 2 or more")
        interval = INTERVAL
    linear = [layer for layer in range(model.num_layers) if (layer + 1) % interval]
    model.linear_attention = LinearAttentionConfig(
        layers=read_layer_types(fields, model, linear, LINEAR),
        num_key_heads=fields.take("linear_num_key_heads", int, 16),
        num_value_heads=fields.take("linear_num_value_heads", int, 32),
        key_head_dim=fields.take("linear_key_head_dim", int, 128),
        value_head_dim=fields.take("linear_value_head_dim", int, 128),
        conv_kernel_dim=fields.take("linear_conv_kernel_dim", int, 4),
    )
    return model


_QUERY_KEY_VALUE = (
    hf(HF_ATTENTION + "q_proj.weight", "query_and_gate", "hidden"),
    hf(HF_ATTENTION + "k_proj.weight", "key", "hidden"),
    hf(HF_ATTENTION + "v_proj.weight", "key", "hidden"),
)
# The rows of Megatron's ``in_proj`` as its checkpoints have them; the first three are those of ``conv1d``, too.
STORED = (
    ("query", "delta_key"),
    ("key", "delta_key"),
    ("value", "delta_value"),
    ("z", "delta_value"),
    ("beta", "delta_heads"),
    ("alpha", "delta_heads"),
)
_QKV = Rule(ATTENTION + "linear_qkv.weight", _QUERY_KEY_VALUE, gated_grouped_qkv, axis=Axis.tensor)
# vLLM keeps a gate as another head's query.
_VLLM_QKV = replace(_QKV, name=HF_ATTENTION + "qkv_proj.weight", layout=replicated_qkv)
_INPUT_NORMS = (
    replace(INPUT_NORM, layers=Layers.attention),
    replace(INPUT_NORM, layers=Layers.linear, checkpoint=ATTENTION + "in_proj.layer_norm_weight"),
)
_CONVOLUTION = Rule(
    ATTENTION + "conv1d.weight",
    (hf(HF_LINEAR + "conv1d.weight", "delta_qkv", "one", "delta_conv"),),
    Sections(split, ("delta_key", "delta_key", "delta_value")),
    axis=Axis.tensor,
    stored_parts=STORED[:3],
)
_A_LOG = Rule(ATTENTION + "A_log", (hf(HF_LINEAR + "A_log", "delta_heads"),), split, axis=Axis.tensor)


def hybrid(in_proj: Rule, *projections: Rule) -> Tables:
    """The tensors outside the MLPs.  in_proj, projections: Megatron's and vLLM's projections of linear attention."""
    attention = Tables((_QKV,), (_VLLM_QKV,)) + OUTPUT_PROJECTION + QK_NORM
    linear = (
        Tables((in_proj,), projections)
        + alike(
            _CONVOLUTION,
            Rule(ATTENTION + "dt_bias", (hf(HF_LINEAR + "dt_bias", "delta_heads"),), split, axis=Axis.tensor),
        )
        + Tables((_A_LOG,), (replace(of_vllm(_A_LOG), dtype="float32"),))
        + alike(
            Rule(ATTENTION + "out_norm.weight", (hf(HF_LINEAR + "norm.weight", "delta_value_head"),)),
            Rule(
                ATTENTION + "out_proj.weight",
                (hf(HF_LINEAR + "out_proj.weight", "hidden", "delta_value"),),
                split,
                dim=1,
                axis=Axis.tensor,
            ),
        )
    )
    norms = Tables((*_INPUT_NORMS, *PRE_MLP_NORM), NORMS.rollout)
    return ENDS + norms + attention.replaced(layers=Layers.attention) + linear.replaced(layers=Layers.linear)


EXPERTS_TABLES = experts(HF_MLP) + qwen2_moe.gated_shared_expert(Axis.shared_expert)
_QKVZ = hf(HF_LINEAR + "in_proj_qkvz.weight", "delta_qkvz", "hidden")
_BA = hf(HF_LINEAR + "in_proj_ba.weight", "delta_ba", "hidden")
_IN_PROJ = Rule(ATTENTION + "in_proj.weight", (_QKVZ, _BA), delta_projections, axis=Axis.tensor, stored_parts=STORED)
# vLLM keeps both projections as the checkpoint has them, key head by key head.
_PROJECTIONS = tuple(Rule(tensor.name, (tensor,), split, axis=Axis.tensor) for tensor in (_QKVZ, _BA))
TABLES = hybrid(_IN_PROJ, *_PROJECTIONS) + DENSE_MLP + EXPERTS_TABLES


def prediction_layer(weights: tuple[Rule, ...], mlp: Layers) -> tuple[str, ...]:
    """The names of a layer of multi-token prediction, which attends, and of what joins it to the others.

    ``Qwen3NextMultiTokenPredictor`` and ``Qwen3_5MultiTokenPredictor`` in vLLM 0.32.  mlp: dense or with experts.
    """
    joining = ("fc.weight", "norm.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight")
    layer = (
        tensor.name.replace("model.", "mtp.", 1)
        for rule in weights
        for tensor in rule.hf
        if rule.stage is Stage.layer and rule.layers in (Layers.all, Layers.attention, mlp)
    )
    return (*("mtp." + name for name in joining), *layer)


FAMILY = Family(
    name="qwen3_next",
    architectures=("Qwen3NextForCausalLM",),
    model_type="qwen3_next",
    read=read,
    weights=TABLES.weights,
    rollout=TABLES.rollout,
    ignored=prediction_layer(TABLES.weights, Layers.experts),
)
