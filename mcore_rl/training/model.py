"""From our configuration to the Megatron modules of this rank.

Builds ``GPTModel`` chunks for a decoder family under any layout, from Transformer Engine's layers or from the local
ones.  Loads no weights and decides nothing about training.  ``place_layers`` places every layer, so none can be lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.activations import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.moe.moe_layer import MoELayer

from mcore_rl.config.engine import EngineConfig, LayerSpec, Precision, Recompute
from mcore_rl.config.model import Activation, ModelConfig, RouterScore
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.config.role import Head
from mcore_rl.parallel.groups import ProcessGroups
from mcore_rl.parallel.layout import place_layers
from mcore_rl.training.fusions import UNFUSED, Fusions
from mcore_rl.training.grouped_experts import keep_tokens_local
from mcore_rl.training.heads import HiddenHead, ValueHead
from mcore_rl.training.layers import block_spec, has_head_norms
from mcore_rl.training.rope import (
    AxesRotaryEmbedding,
    PackedRotaryEmbedding,
    frequency_sets,
    score_scale,
    set_frequencies,
)
from mcore_rl.training.vision import build_tower, set_trained

DTYPES = {Precision.float32: torch.float32, Precision.bfloat16: torch.bfloat16}


# Megatron fuses silu and the gate (bias_activation_fusion); its fused tanh gelu rounds other constants than PyTorch's,
# and its fused quick_gelu clamps before the bias is added (fusions/fused_bias_geglu.py).
_ACTIVATIONS = {
    Activation.silu: F.silu,
    Activation.gelu_tanh: partial(F.gelu, approximate="tanh"),
    Activation.quick_gelu: quick_gelu,
}

_RECOMPUTE: dict[Recompute, dict[str, Any]] = {
    Recompute.none: {},
    Recompute.selective: {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    Recompute.full: {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """Rows of the embedding: the vocabulary, padded to a multiple of ``tp``.  The padding is never scored."""
    return -(-vocab_size // tp) * tp


def transformer_config(
    model: ModelConfig,
    parallel: ParallelConfig,
    engine: EngineConfig,
    layer_spec: LayerSpec,
    fusions: Fusions = UNFUSED,
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
        layernorm_epsilon=model.norm_epsilon,
        add_qkv_bias=model.qkv_bias,
        normalization="RMSNorm",
        add_bias_linear=model.linear_bias,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        layernorm_zero_centered_gamma=model.zero_centered_norm,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=fusions.gradient_accumulation_fusion,
        tp_comm_overlap=fusions.tp_comm_overlap,
        # The local layers rotate before Megatron would (``rotation.py``).
        apply_rope_fusion=layer_spec is LayerSpec.transformer_engine and model.mla is None,
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
        moe_flex_dispatcher_backend=engine.moe.flex_backend.value,
        moe_permute_fusion=fusions.permute_fusion,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
        **_RECOMPUTE[engine.recompute],
        **_gate(model),
        **_attention(model),
        **_experts(model, layer_spec),
        **_passed_on(engine),
    )


def _passed_on(engine: EngineConfig) -> dict[str, Any]:
    """The fields that ``megatron`` names, with Megatron's enum where a name stands for its value."""
    fields = dict(engine.megatron)
    if "attention_backend" in fields:
        fields["attention_backend"] = AttnBackend[fields["attention_backend"]]
    return fields


def _gate(model: ModelConfig) -> dict[str, Any]:
    return {
        "activation_func": _ACTIVATIONS[model.activation],
        "gated_linear_unit": True,
        "activation_func_clamp_value": model.activation_clamp,
        "glu_linear_offset": model.glu_linear_offset,
        "bias_activation_fusion": model.activation is Activation.silu,
    }


def _attention(model: ModelConfig) -> dict[str, Any]:
    # A joint norm is split over tensor ranks: Megatron must not sum its gradients (``JointHeadNorm``).
    settings: dict[str, Any] = {"qk_layernorm": model.qk_norm and not model.joint_qk_norm}
    if model.mla is None:
        settings |= {"kv_channels": model.head_dim, "softmax_scale": score_scale(model)}
        settings["attention_output_gate"] = model.attention_output_gate
        settings["rotary_interleaved"] = model.rotary_interleaved
        if model.no_rope_layers:
            settings["no_rope_freq"] = [int(layer in model.no_rope_layers) for layer in range(model.num_layers)]
    else:
        scale = model.head_dim**-0.5 if model.softmax_scale is None else model.softmax_scale
        # kv_channels: width of a value head, the input of the output projection; ``LatentAttention`` has the rest.
        settings |= {"multi_latent_attention": True, "kv_channels": model.mla.v_head_dim, "softmax_scale": scale}
    if model.attention_sinks:
        settings["softmax_type"] = "learnable"
    if model.sliding_layers:
        assert model.sliding_window is not None, "model_violations lets no sliding layers without a window through"
        settings["window_size"] = (model.sliding_window - 1, 0)  # keys to the left of a query's own, and to the right
        settings["window_attn_skip_freq"] = [int(layer in model.sliding_layers) for layer in range(model.num_layers)]
    return settings


def _experts(model: ModelConfig, layer_spec: LayerSpec) -> dict[str, Any]:
    moe = model.moe
    if moe is None:
        return {}
    limited = moe.top_k_groups < moe.num_groups
    return {
        "num_moe_experts": moe.num_experts,
        # Specs decide; parts of Megatron look here (its checkpoints: transformer/transformer_block.py:833).
        "moe_layer_freq": [int(model.has_experts(layer)) for layer in range(model.num_layers)],
        "moe_router_topk": moe.top_k,
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size or None,
        "moe_shared_expert_gate": moe.shared_gate,
        "moe_router_pre_softmax": not moe.norm_topk_prob,
        "moe_router_score_function": moe.score.value,
        # In float32 as in transformers, where scores are sigmoids (DeepseekV3TopkRouter, Glm4MoeTopkRouter) and in
        # DeepSeek-V2 (DeepseekV2TopkRouter).
        "moe_router_dtype": "fp32" if moe.score is RouterScore.sigmoid or model.mla is not None else None,
        "moe_router_enable_expert_bias": moe.expert_bias,
        "moe_router_bias_update_rate": 0.0,  # it stays fixed
        "moe_router_num_groups": moe.num_groups if limited else None,
        "moe_router_group_topk": moe.top_k_groups if limited else None,
        "moe_router_topk_scaling_factor": moe.routed_scaling_factor,
        "moe_router_load_balancing_type": "none",  # our router has losses of its own
        "moe_grouped_gemm": layer_spec is LayerSpec.transformer_engine,
    }


def build_chunks(
    model: ModelConfig,
    config: TransformerConfig,
    parallel: ParallelConfig,
    layer_spec: LayerSpec,
    groups: ProcessGroups,
    *,
    head: Head,
    train_tower: bool = False,
) -> list[GPTModel]:
    """The model chunks of this rank, one per virtual stage, with Megatron's initial weights.

    head: a value head takes the place of the output projection in the last stage, and is never tied to the embedding;
    so does what hands out hidden states.  train_tower: whether a vision tower learns; else it is frozen.
    """
    placement = place_layers(model.num_layers, parallel)
    chunks = []
    for vp_stage in range(parallel.vpp):
        chunk_index = vp_stage * parallel.pp + groups.coords.pp
        is_last = chunk_index == len(placement) - 1
        spec = block_spec(model, config, layer_spec, placement[chunk_index])
        with _norms_of_heads(model, config):
            chunk = GPTModel(
                config=config,
                transformer_layer_spec=spec,
                vocab_size=padded_vocab_size(model.vocab_size, parallel.tp),
                max_sequence_length=model.max_position_embeddings,
                pre_process=chunk_index == 0,
                post_process=is_last,
                share_embeddings_and_output_weights=model.tie_output and head is Head.lm,
                position_embedding_type="rope",
                rotary_percent=model.rotary_percent,
                rotary_base=model.rotary_base,  # type: ignore[arg-type]
                vp_stage=vp_stage if parallel.vpp > 1 else None,
            )
        if model.mla is None:
            if not config.apply_rope_fusion:
                kind = PackedRotaryEmbedding if model.mrope is None else AxesRotaryEmbedding
                chunk.rotary_pos_emb = kind.instead_of(chunk.rotary_pos_emb, groups.device, config.params_dtype)
                if model.mrope is not None:
                    chunk.rotary_pos_emb.rotate_by(model.mrope)
            set_frequencies(chunk.rotary_pos_emb, *frequency_sets(model))
        if chunk_index == 0 and model.embedding_scale != 1.0:
            chunk.embedding.register_forward_hook(ScaledEmbeddings(model.embedding_scale, config.params_dtype))
        if chunk_index == 0 and model.vision is not None:
            chunk.vision = build_tower(model.vision, model.hidden_size, groups.device, config.params_dtype)
            set_trained(chunk.vision, train_tower, sums_over_tensor_ranks=config.sequence_parallel)
        _reduce_experts_over_their_own_group(chunk)
        keep_tokens_local(chunk)
        _forget_routing(chunk)
        if is_last and head is Head.value:
            chunk.output_layer = ValueHead(config, groups.tp, groups.device)
        if is_last and head is Head.hidden:
            chunk.output_layer = HiddenHead(config, groups.tp)
        # Megatron makes weights on the current device, except those of torch's norms and of routers
        # (transformer/moe/router.py:53): its own gating moves these at the first forward, and ours does not.
        chunk.to(groups.device)
        chunks.append(chunk)
    return chunks


@contextmanager
def _norms_of_heads(model: ModelConfig, config: TransformerConfig) -> Iterator[None]:
    """Within: Megatron 0.19 builds what the spec has for query and key norms (transformer/attention.py:1709, 0.19.2).

    It refuses to where ``qk_layernorm`` is not set, and where it is, later sums the gradients of these norms' weights
    over tensor ranks: it is set for more models while they are built.
    """
    sums_gradients = config.qk_layernorm
    config.qk_layernorm = model.mla is None and has_head_norms(model)
    try:
        yield
    finally:
        config.qk_layernorm = sums_gradients


class ScaledEmbeddings:
    """The hook that multiplies embeddings by ``factor``.

    transformers rounds it to the weights' dtype (Gemma2TextScaledWordEmbedding), and Gemma was trained so.
    """

    def __init__(self, scale: float, dtype: torch.dtype) -> None:
        self.factor: float = torch.tensor(scale, dtype=dtype, device="cpu").item()

    def __call__(self, module: torch.nn.Module, arguments: object, embeddings: torch.Tensor) -> torch.Tensor:
        """See ``torch.nn.Module.register_forward_hook``."""
        return embeddings * self.factor


def _forget_routing(chunk: GPTModel) -> None:
    # A dispatcher keeps the probabilities of its last forward pass, and by their graph the layer's input and its
    # gradient: of every layer with experts, until its next forward pass.  Backward reads neither.
    def forget(module: MoELayer, *_: object) -> None:
        dispatcher = module.token_dispatcher
        for name in {"probs", "local_probs"} & vars(dispatcher).keys():
            setattr(dispatcher, name, None)

    for module in chunk.modules():
        if isinstance(module, MoELayer):
            module.register_forward_hook(forget)


def _reduce_experts_over_their_own_group(chunk: GPTModel) -> None:
    # Megatron 0.16.1 does this only if ep > 1 (tensor_parallel/layers.py:886).  With ep=1 and etp < tp it would not sum
    # the gradients of experts that are replicated over tensor ranks.  0.19.2 does it then too (:961).
    for module in chunk.modules():
        if isinstance(module, MoELayer):
            for parameter in module.experts.parameters():
                parameter.allreduce = False
