"""Specs of a model chunk's decoder layers: Megatron's own parallel linears with our parts, or Transformer Engine's.

Layers of one model may differ.  ``training/model.py`` builds modules from these specs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from mcore_rl.config.engine import LayerSpec, Precision
from mcore_rl.config.megatron_versions import dense_mlp, submodules_of
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.ground.errors import Violation
from mcore_rl.parallel.device import Platform, have_transformer_engine
from mcore_rl.training.attention import PackedAttention
from mcore_rl.training.gated_delta_net import PackedGatedDeltaNet
from mcore_rl.training.grouped_experts import ExpertOutputLinear, GroupedExperts
from mcore_rl.training.latent_attention import LatentAttention, ReplicatedLinear
from mcore_rl.training.norm import JointHeadNorm, RMSNorm
from mcore_rl.training.rope import ScaledKeyPart
from mcore_rl.training.rotation import GatedSelfAttention, RotatedSelfAttention, TwoBaseAttention
from mcore_rl.training.router import Router
from mcore_rl.training.sandwich import NormedRowParallelLinear

_ATTENTION_KEYS = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
_LATENT_ATTENTION_KEYS = {
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}


_LINEAR_ATTENTION_KEYS = {"input_layernorm.": "self_attention.in_proj.layer_norm_"}


def _local_layer(model: ModelConfig, layer: int) -> ModuleSpec:
    """Decoder layer ``layer`` (from 0) of Megatron's own parallel linears and our norm, attention and router."""
    has_experts = model.has_experts(layer)
    is_linear = model.is_linear(layer)
    output_linear = NormedRowParallelLinear if model.sandwich_norm else RowParallelLinear
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=output_linear)
    mlp = dense_mlp(MLP, ModuleSpec, linears)
    if has_experts:
        of_experts = replace(linears, linear_fc2=ExpertOutputLinear) if model.linear_bias else linears
        experts = ModuleSpec(module=GroupedExperts, submodules=of_experts)
        shared = ModuleSpec(module=SharedExpertMLP, submodules=linears)  # built where the configuration gives a width
        parts = MoESubmodules(experts=experts, shared_experts=shared, router=Router)
        mlp = ModuleSpec(module=MoELayer, submodules=parts)
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=_linear_attention(model) if is_linear else _local_attention(model, output_linear),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
            # Checkpoint keys are Transformer Engine's, so that either spec loads what the other saved.
            sharded_state_dict_keys_map=_attention_keys(model, is_linear)
            | ({} if has_experts else {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}),
        ),
    )


def _attention_keys(model: ModelConfig, is_linear: bool) -> dict[str, str]:
    if is_linear:
        return _LINEAR_ATTENTION_KEYS
    return _ATTENTION_KEYS if model.mla is None else _LATENT_ATTENTION_KEYS


def _linear_attention(model: ModelConfig) -> ModuleSpec:
    """The spec of a layer's gated delta net, whose norm is not zero-centred, whatever the others are."""
    parts = GatedDeltaNetSubmodules(
        in_proj=ColumnParallelLinear,
        out_norm=ModuleSpec(module=RMSNorm, params={"zero_centered": False}),
        out_proj=RowParallelLinear,
    )
    return ModuleSpec(module=PackedGatedDeltaNet, params={"linear": model.linear_attention}, submodules=parts)


def _local_attention(model: ModelConfig, output_linear: type) -> ModuleSpec:
    """The spec of grouped-query or latent self-attention."""
    params: dict[str, Any] = {"attn_mask_type": AttnMaskType.causal}
    core = ModuleSpec(module=PackedAttention, params={"soft_cap": model.attention_soft_cap})
    if model.mla is None:
        query_norm, key_norm = _head_norms(model)
        attention = SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=core,
            linear_proj=output_linear,
            q_layernorm=query_norm,
            k_layernorm=key_norm,
        )
        if model.local_rotary_base is not None:
            return ModuleSpec(module=TwoBaseAttention, params=params, submodules=attention)
        kind = GatedSelfAttention if model.attention_output_gate else RotatedSelfAttention
        return ModuleSpec(module=kind, params=params, submodules=attention)
    latent_attention = MLASelfAttentionSubmodules(
        linear_q_proj=ColumnParallelLinear,
        linear_q_down_proj=ReplicatedLinear,
        linear_q_up_proj=ColumnParallelLinear,
        linear_kv_down_proj=ReplicatedLinear,
        linear_kv_up_proj=ColumnParallelLinear,
        core_attention=core,
        linear_proj=output_linear,
        q_layernorm=RMSNorm,
        kv_layernorm=RMSNorm,
    )
    return ModuleSpec(module=LatentAttention, params=params | {"model": model}, submodules=latent_attention)


def _head_norms(model: ModelConfig) -> tuple[Any, Any]:
    """What queries and keys pass between their projection and the rotation."""
    factor = model.rope.attention_factor
    rotated = model.rotary_dim
    if factor != 1.0 and rotated < model.head_dim:
        assert not model.qk_norm, "the scale of the rotation stands where the norm of the keys would"
        return IdentityOp, ModuleSpec(module=ScaledKeyPart, params={"scale": factor**2, "rotary_dim": rotated})
    if not model.qk_norm:
        return IdentityOp, IdentityOp
    if not model.joint_qk_norm:
        return RMSNorm, RMSNorm
    query, key = (
        ModuleSpec(module=JointHeadNorm, params={"num_heads": heads})
        for heads in (model.num_attention_heads, model.num_query_groups)
    )
    return query, key


def has_head_norms(model: ModelConfig) -> bool:
    """Whether queries or keys of grouped-query attention pass a norm, or what stands in its place."""
    return _head_norms(model) != (IdentityOp, IdentityOp)


def transformer_engine_lacks(model: ModelConfig, parallel: ParallelConfig) -> str | None:
    """A feature that ``model`` needs under ``parallel`` and Transformer Engine's layers lack, in words, or None."""
    if model.attention_soft_cap is not None:
        return f"its attention has no soft cap, and the model's is {model.attention_soft_cap:g}"
    if model.attention_sinks:
        return "its attention has no sinks for packed sequences, and the model has them"
    if model.sandwich_norm:
        return "its output linears have no norm behind them, and the model does"
    if model.rotary_interleaved:
        return "its rotation of neighbouring pairs is untested here, and the model has it"
    if model.linear_attention is not None:
        return "its layers with linear attention take no packed sequences, and the model has some"
    if model.mrope is not None:
        return "its rotation of packed sequences has one position for a token, and the model has three"
    if model.sliding_layers and parallel.cp > 1:
        return f"its ring attention (cp={parallel.cp}) has no sliding window, and the model has one"
    return None


def transformer_engine_problem(
    model: ModelConfig, parallel: ParallelConfig, precision: Precision, platform: Platform
) -> str | None:
    """Why Transformer Engine's layers cannot be used here, or None."""
    if not platform.is_accelerator:
        return "it runs on accelerators only"
    if not have_transformer_engine():
        return "it cannot be imported"
    if precision is Precision.float32:
        return "its packed attention has no float32 kernel"
    return transformer_engine_lacks(model, parallel)


def resolve_layer_spec(wanted: LayerSpec, problem: str | None) -> tuple[LayerSpec, list[Violation]]:
    """(the layer spec to use, violations): ``auto`` takes Transformer Engine unless there is a ``problem`` with it.

    Asking for Transformer Engine in spite of a ``problem`` is a violation.
    """
    if wanted is LayerSpec.auto:
        return (LayerSpec.local if problem else LayerSpec.transformer_engine), []
    if wanted is LayerSpec.transformer_engine and problem:
        remedy = "Write layer_spec=auto or layer_spec=local; it needs a GPU, to be installed, and precision=bfloat16"
        return LayerSpec.local, [Violation("layer_spec", wanted.value, problem, remedy)]
    return wanted, []


def _transformer_engine_layer(model: ModelConfig, config: TransformerConfig, *, has_experts: bool) -> ModuleSpec:
    """Megatron's Transformer Engine layer with our router and our latent attention."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts if has_experts else None,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm or model.mla is not None,  # of latents: fused into the up projections
        multi_latent_attention=model.mla is not None,
    )
    if model.mla is not None:
        attention = spec.submodules.self_attention
        attention.module = LatentAttention
        attention.params = attention.params | {"model": model}
        widths = {"k_channels": model.head_dim, "v_channels": model.mla.v_head_dim}
        attention.submodules.core_attention = ModuleSpec(module=attention.submodules.core_attention, params=widths)
    if model.mla is None and not config.qk_layernorm:
        attention = spec.submodules.self_attention.submodules
        attention.q_layernorm, attention.k_layernorm = _head_norms(model)
    if has_experts:
        submodules_of(spec.submodules.mlp).router = Router
    return spec


def block_spec(
    model: ModelConfig, config: TransformerConfig, layer_spec: LayerSpec, layers: Sequence[int]
) -> TransformerBlockSubmodules:
    """The layers of one model chunk and the final norm.  layers: numbers in the whole model, from 0."""
    if layer_spec is LayerSpec.local:
        specs = [_local_layer(model, layer) for layer in layers]
        return TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm)
    from megatron.core.extensions.transformer_engine import TENorm

    specs = [_transformer_engine_layer(model, config, has_experts=model.has_experts(layer)) for layer in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=TENorm)
