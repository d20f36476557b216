"""Qwen3-Next: a gated delta net in most layers, gated attention in the others, experts and a gated shared expert.

The layer of multi-token prediction (``mtp.*``) is left out: it is not part of the policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mcore_rl.config.model import LinearAttentionConfig, ModelConfig, MoeConfig
from mcore_rl.families import qwen2_moe
from mcore_rl.families import rollout_blocks as rollout
from mcore_rl.families.blocks import (
    ATTENTION,
    DENSE_MLP,
    ENDS,
    HF_ATTENTION,
    HF_LAYER,
    HF_MLP,
    INPUT_NORM,
    OUTPUT_PROJECTION,
    PRE_MLP_NORM,
    QK_NORM,
    experts,
)
from mcore_rl.families.decoder import LINEAR, Defaults, read_decoder, read_dense_layers, read_layer_types
from mcore_rl.families.family import Family
from mcore_rl.families.fields import Fields
from mcore_rl.families.rope import Reader
from mcore_rl.families.rules import (
    Axis,
    HfTensor,
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
PARTIAL_ROTARY_FACTOR, INTERVAL = 0.25, 4  # the class's defaults


def read(fields: Fields) -> ModelConfig:
    """Reads the fields of ``Qwen3NextConfig``."""
    model = read_hybrid(fields, DEFAULTS)
    fields.demand("tie_word_embeddings", False, because="ties the output to the embedding, and vLLM 0.32 does not")
    model.moe = read_experts(fields, num_experts=512, top_k=10)
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


def read_experts(fields: Fields, num_experts: int, top_k: int) -> MoeConfig:
    """Experts beside a gated one that all tokens share.  num_experts, top_k: the class's defaults."""
    shared = fields.take("shared_expert_intermediate_size", int, 512)
    if shared < 1:
        fields.refuse("shared_expert_intermediate_size", "this family has a shared expert", "Write 1 or more")
    return MoeConfig(
        num_experts=fields.take("num_experts", int, num_experts),
        top_k=fields.take("num_experts_per_tok", int, top_k),
        ffn_hidden_size=fields.take("moe_intermediate_size", int, 512),
        shared_ffn_hidden_size=shared,
        shared_gate=shared > 0,
    )


def _only_in(layers: Layers, *rules: Rule) -> tuple[Rule, ...]:
    return tuple(replace(rule, layers=layers) for rule in rules)


QUERY_KEY_VALUE = (
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
QKVZ = hf(HF_LINEAR + "in_proj_qkvz.weight", "delta_qkvz", "hidden")
BA = hf(HF_LINEAR + "in_proj_ba.weight", "delta_ba", "hidden")
CONVOLUTION = Sections(split, ("delta_key", "delta_key", "delta_value"))
CONV1D = hf(HF_LINEAR + "conv1d.weight", "delta_qkv", "one", "delta_conv")
DT_BIAS = hf(HF_LINEAR + "dt_bias", "delta_heads")
A_LOG = hf(HF_LINEAR + "A_log", "delta_heads")
NORM = hf(HF_LINEAR + "norm.weight", "delta_value_head")
OUT = hf(HF_LINEAR + "out_proj.weight", "hidden", "delta_value")


def _linear(projections: tuple[Rule, ...], prefix: str, norm: str, a_log_dtype: str | None = None) -> tuple[Rule, ...]:
    """The rows of linear attention, of which Megatron and vLLM name and keep a few otherwise."""

    def cut(name: str, tensor: HfTensor, dim: int = 0) -> Rule:
        return Rule(prefix + name, (tensor,), split, dim=dim, axis=Axis.tensor)

    return _only_in(
        Layers.linear,
        *projections,
        cut("dt_bias", DT_BIAS),
        replace(cut("A_log", A_LOG), dtype=a_log_dtype),
        Rule(prefix + norm, (NORM,)),
        cut("out_proj.weight", OUT, dim=1),
    )


def hybrid_weights(in_proj: Rule) -> tuple[Rule, ...]:
    """Megatron's tensors outside the MLPs.  in_proj: the projections of linear attention."""
    return (
        *ENDS,
        *_only_in(Layers.attention, INPUT_NORM),
        *_only_in(Layers.linear, replace(INPUT_NORM, checkpoint=ATTENTION + "in_proj.layer_norm_weight")),
        *PRE_MLP_NORM,
        *_only_in(
            Layers.attention,
            Rule(ATTENTION + "linear_qkv.weight", QUERY_KEY_VALUE, gated_grouped_qkv, axis=Axis.tensor),
            OUTPUT_PROJECTION,
            *QK_NORM,
        ),
        *_linear(
            (
                in_proj,
                Rule(ATTENTION + "conv1d.weight", (CONV1D,), CONVOLUTION, axis=Axis.tensor, stored_parts=STORED[:3]),
            ),
            ATTENTION,
            "out_norm.weight",
        ),
    )


def hybrid_rollout(*projections: Rule) -> tuple[Rule, ...]:
    """vLLM's tensors outside the MLPs; it keeps a gate as another head's query.

    projections: those of linear attention.
    """
    return (
        *rollout.ENDS,
        *rollout.NORMS,
        *_only_in(
            Layers.attention,
            Rule(HF_ATTENTION + "qkv_proj.weight", QUERY_KEY_VALUE, replicated_qkv, axis=Axis.tensor),
            rollout.OUTPUT_PROJECTION,
            *rollout.QK_NORM,
        ),
        *_linear(
            (*projections, Rule(HF_LINEAR + "conv1d.weight", (CONV1D,), CONVOLUTION, axis=Axis.tensor)),
            HF_LINEAR,
            "norm.weight",
            a_log_dtype="float32",
        ),
    )


ROLLOUT_EXPERTS = (
    *rollout.experts(HF_MLP),
    *rollout.gated_mlp(HF_MLP + "shared_expert.", "shared_ffn", Layers.experts, Axis.shared_expert),
    rollout.same(hf(HF_MLP + "shared_expert_gate.weight", "one", "hidden"), Layers.experts),
)
WEIGHTS = (
    *hybrid_weights(
        Rule(ATTENTION + "in_proj.weight", (QKVZ, BA), delta_projections, axis=Axis.tensor, stored_parts=STORED)
    ),
    *DENSE_MLP,
    *experts(HF_MLP),
    *qwen2_moe.SHARED,
)
# vLLM keeps both projections as the checkpoint has them, key head by key head.
ROLLOUT = (
    *hybrid_rollout(*(Rule(tensor.name, (tensor,), split, axis=Axis.tensor) for tensor in (QKVZ, BA))),
    *rollout.DENSE_MLP,
    *ROLLOUT_EXPERTS,
)


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
    weights=WEIGHTS,
    rollout=ROLLOUT,
    ignored=prediction_layer(WEIGHTS, Layers.experts),
)
