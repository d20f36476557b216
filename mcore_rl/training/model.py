"""From our configuration to the Megatron modules of this rank.

Builds ``GPTModel`` chunks for a decoder family under any layout, from Transformer Engine's layers or from the local
ones.  Loads no weights and decides nothing about training.  Every layer is placed by ``place_layers``, so none can
be lost.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from mcore_rl.config.engine import EngineConfig, LayerSpec, Precision, Recompute
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.parallel.groups import Groups
from mcore_rl.parallel.layout import place_layers
from mcore_rl.training.attention import PackedAttention
from mcore_rl.training.norm import RMSNorm
from mcore_rl.training.router import Router
from mcore_rl.training.value_head import ValueHead

DTYPES = {Precision.float32: torch.float32, Precision.bfloat16: torch.bfloat16}


_RECOMPUTE: dict[Recompute, dict[str, Any]] = {
    Recompute.none: {},
    Recompute.selective: {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    Recompute.full: {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """Rows of the embedding: the vocabulary, padded to divide over the tensor ranks.  The padding is never scored."""
    return -(-vocab_size // tp) * tp


def transformer_config(
    model: ModelConfig, parallel: ParallelConfig, engine: EngineConfig, layer_spec: LayerSpec
) -> TransformerConfig:
    """Megatron's configuration of ``model`` under ``parallel``.  layer_spec: resolved, not ``auto``."""
    assert layer_spec is not LayerSpec.auto, "resolve the layer spec first"
    dtype = DTYPES[engine.precision]
    placement = place_layers(model.num_layers, parallel)
    stages = [["decoder"] * len(layers) for layers in placement]
    stages[0] = ["embedding", *stages[0]]
    stages[-1] = [*stages[-1], "loss"]
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.head_dim,
        layernorm_epsilon=model.norm_epsilon,
        add_qkv_bias=model.qkv_bias,
        qk_layernorm=model.qk_norm,
        normalization="RMSNorm",
        activation_func=F.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_activation_fusion=True,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        # The unfused one reads the boundaries of packed sequences back in every layer; only Transformer Engine fuses.
        apply_rope_fusion=layer_spec is LayerSpec.transformer_engine,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        # Sums over microbatches and ranks, never means: the caller's denominators do the rest (DESIGN 4).
        calculate_per_token_loss=True,
        tensor_model_parallel_size=parallel.tp,
        sequence_parallel=parallel.tp > 1,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        # Two stages exchange both directions at once; only the overlapping calls keep them apart
        # (p2p_communication.py:54).
        overlap_p2p_comm=parallel.vpp > 1,
        batch_p2p_comm=parallel.vpp == 1,
        pipeline_model_parallel_layout=stages if parallel.pp > 1 else None,
        context_parallel_size=parallel.cp,
        moe_token_dispatcher_type=engine.moe.dispatcher.value,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
        **_RECOMPUTE[engine.recompute],
        **_experts(model, layer_spec),
    )


def _experts(model: ModelConfig, layer_spec: LayerSpec) -> dict[str, Any]:
    if model.moe is None:
        return {}
    return {
        "num_moe_experts": model.moe.num_experts,
        "moe_router_topk": model.moe.top_k,
        "moe_ffn_hidden_size": model.moe.ffn_hidden_size,
        "moe_router_pre_softmax": not model.moe.norm_topk_prob,
        "moe_router_load_balancing_type": "none",  # our router has losses of its own
        "moe_grouped_gemm": layer_spec is LayerSpec.transformer_engine,
    }


def _local_layer(config: TransformerConfig) -> ModuleSpec:
    """One decoder layer out of Megatron's own parallel linears and our norm, attention and router."""
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    mlp = ModuleSpec(module=MLP, submodules=linears)
    if config.num_moe_experts is not None:
        experts = ModuleSpec(module=SequentialMLP, submodules=linears)
        mlp = ModuleSpec(module=MoELayer, submodules=MoESubmodules(experts=experts, router=Router))
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=PackedAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=RMSNorm if config.qk_layernorm else IdentityOp,
        k_layernorm=RMSNorm if config.qk_layernorm else IdentityOp,
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(
                module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
            # Checkpoint keys are Transformer Engine's, so that either spec loads what the other saved.
            sharded_state_dict_keys_map={"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
            | ({} if config.num_moe_experts else {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}),
        ),
    )


def _transformer_engine_layer(config: TransformerConfig) -> ModuleSpec:
    """Megatron's Transformer Engine layer with our router."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
    )
    if config.num_moe_experts is not None:
        spec.submodules.mlp.submodules.router = Router
    return spec


def block_spec(config: TransformerConfig, layer_spec: LayerSpec, num_layers: int) -> TransformerBlockSubmodules:
    """The layers of one model chunk and the norm after the last of all."""
    if layer_spec is LayerSpec.local:
        return TransformerBlockSubmodules(layer_specs=[_local_layer(config)] * num_layers, layer_norm=RMSNorm)
    from megatron.core.extensions.transformer_engine import TENorm

    return TransformerBlockSubmodules(layer_specs=[_transformer_engine_layer(config)] * num_layers, layer_norm=TENorm)


def build_chunks(
    model: ModelConfig, config: TransformerConfig, parallel: ParallelConfig, layer_spec: LayerSpec, groups: Groups,
    *, critic: bool,
) -> list[GPTModel]:  # fmt: skip
    """The model chunks of this rank, one per virtual stage, with Megatron's initial weights.

    critic: a value head in the last stage instead of the output projection; its embedding is never tied to it.
    """
    placement = place_layers(model.num_layers, parallel)
    chunks = []
    for vp_stage in range(parallel.vpp):
        chunk_index = vp_stage * parallel.pp + groups.coords.pp
        is_last = chunk_index == len(placement) - 1
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=block_spec(config, layer_spec, len(placement[chunk_index])),
            vocab_size=padded_vocab_size(model.vocab_size, parallel.tp),
            max_sequence_length=model.max_position_embeddings,
            pre_process=chunk_index == 0,
            post_process=is_last,
            share_embeddings_and_output_weights=model.tie_output and not critic,
            position_embedding_type="rope",
            rotary_base=model.rotary_base,  # type: ignore[arg-type]
            vp_stage=vp_stage if parallel.vpp > 1 else None,
        )
        _reduce_experts_over_their_own_group(chunk)
        if is_last and critic:
            chunk.output_layer = ValueHead(config, groups.tp, groups.device)
        # Megatron makes weights on the current device, but for those of routers (transformer/moe/router.py:53), which
        # its own gating moves at the first forward and ours does not, and of norms made by torch.
        chunk.to(groups.device)
        chunks.append(chunk)
    return chunks


def _reduce_experts_over_their_own_group(chunk: GPTModel) -> None:
    # Megatron does this only where ep > 1 (tensor_parallel/layers.py:829), and so, with ep=1 and etp < tp, reduces the
    # gradients of experts that are replicated over tensor ranks over none of them.
    for module in chunk.modules():
        if isinstance(module, MoELayer):
            for parameter in module.experts.parameters():
                parameter.allreduce = False
