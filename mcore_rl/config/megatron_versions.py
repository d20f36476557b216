"""The versions of megatron-core that this package runs with, and all that differs between them for it.

Nothing else of the package asks for a version.  Where one way serves both, it stands where it is used: parameters with
a default for what Megatron passes in one version alone (``is_mtp_layer`` of routers, ``name`` of attentions), norms of
heads while a model is built (``training/model.py``), attributes by which a gated delta net's checkpoint is described.
"""

from __future__ import annotations

from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

MEGATRON_VERSIONS = ("0.16.1", "0.19.2")  # on Python 3.11, and on 3.12 and newer, which 0.19.2 requires

# Fields of TransformerConfig and ModelParallelConfig that one version has and the other has not.
ONLY_IN: dict[str, tuple[str, ...]] = {
    "0.16.1": (
        "async_tensor_model_parallel_allreduce",
        "moe_extended_tp",
        "moe_use_legacy_grouped_gemm",
    ),
    "0.19.2": (
        "activation_offload_fraction",
        "cpu_offloading_retain_pinned_cpu_buffers",
        "cuda_graph_modules",
        "delay_offload_until_cuda_graph",
        "delta_offload_bytes_across_pp_ranks",
        "dsa_indexer_k_norm_epsilon",
        "dsa_indexer_k_norm_fp32",
        "dsa_indexer_rope_interleaved",
        "dsa_indexer_rotate_activation",
        "dsa_indexer_scoring_relu",
        "dsa_indexer_skip_topk_offset",
        "dsa_indexer_topk_freq",
        "dsa_kernel_backend",
        "experimental_attention_variant_loss_scale_func",
        "expert_gtp_weight_remat_size",
        "expert_tensor_parallel_num_weight_shards",
        "fine_grained_offloading_max_inflight_offloads",
        "flash_attention_version",
        "fp8_output_proj",
        "fused_residual_rmsnorm",
        "gtp_weight_remat_size",
        "high_priority_a2a_comm_stream",
        "inference_cuda_graph_scope",
        "inference_disable_triton_nvls_kernels",
        "inference_grouped_gemm_backend",
        "inference_moe_disable_fused_quant_kernels",
        "inference_moe_token_dispatcher_type",
        "mamba_training_ssm_states_dtype",
        "mlp_chunks_for_training",
        "moe_expert_rank_capacity_factor",
        "moe_flex_dispatcher_num_sms",
        "moe_grad_scale_func",
        "moe_hybridep_num_blocks_permute",
        "moe_hybridep_num_blocks_unpermute",
        "moe_hybridep_num_sms_preprocessing",
        "moe_hybridep_pad_uneven_dispatch_inputs",
        "moe_mlp_glu_interleave_size",
        "moe_ncclep_static_shape",
        "moe_ncclep_zero_copy",
        "moe_pad_experts_for_cuda_graph_inference",
        "moe_paged_stash",
        "moe_paged_stash_buffer_size_factor_cpu",
        "moe_paged_stash_buffer_size_factor_cuda",
        "moe_paged_stash_page_size",
        "moe_permute_fusion_into_hybridep",
        "moe_router_force_biased",
        "moe_router_quantile_balancing_ema",
        "moe_shared_expert_glu_interleave_size",
        "moe_single_grouped_bias",
        "moe_single_grouped_weight",
        "mtp_detach_heads",
        "mtp_grad_scale_func",
        "mtp_hybrid_override_pattern",
        "mtp_use_repeated_layer",
        "mup_attn_scale_power",
        "mup_base_head_dim",
        "mup_base_hidden_size",
        "mup_embedding_mult",
        "mup_output_mult",
        "mup_width_mult",
        "nccl_all_reduce_for_prefill",
        "overlap_dispatch_backward_with_experts_wgrad",
        "tensor_parallel_num_weight_shards",
        "use_grouped_gemm_for_dense_mlp",
        "use_grouped_gemm_for_shared_expert",
        "use_mup",
        "use_transformer_engine_op_fuser",
    ),
}


@cache
def megatron_version() -> str:
    """The version that is installed."""
    return version("megatron-core")


def absent_fields() -> set[str]:
    """Fields that another version has, and the installed one has not; none where none is installed."""
    try:
        installed = megatron_version()
    except PackageNotFoundError:
        return set()
    return {name for only, names in ONLY_IN.items() if only != installed for name in names}


def dense_mlp(mlp: Any, spec: Any, submodules: Any) -> Any:
    """What a layer builds its dense MLP from.  mlp, spec: Megatron's ``MLP`` and ``ModuleSpec``.

    0.16.1 builds a ``ModuleSpec`` (transformer/transformer_layer.py:354); 0.19.2 warns of it, in every layer, and makes
    what stands here of it itself (:420).
    """
    if megatron_version() == "0.16.1":
        return spec(module=mlp, submodules=submodules)
    return partial(mlp.as_mlp_submodule, submodules=submodules)


def submodules_of(spec: Any) -> Any:
    """The submodules of a layer's MLP as Megatron's own specs have it: a ``ModuleSpec`` in 0.16.1, a partial in 0.19.2.

    models/gpt/moe_module_specs.py has both.
    """
    return spec.submodules if megatron_version() == "0.16.1" else spec.keywords["submodules"]


def grads_for_norm(part: Any) -> list[Any]:
    """The gradients, tensors, of one of Megatron's optimizers that its norm is taken of.

    0.16.1: ``get_main_grads_for_grad_norm`` (optimizer/optimizer.py:136); 0.19.2: ``get_grads_for_grad_norm`` (:280).
    """
    old = megatron_version() == "0.16.1"
    gradients: list[Any] = part.get_main_grads_for_grad_norm() if old else part.get_grads_for_grad_norm()
    return gradients
