"""What ``actor.megatron={FIELD: VALUE}`` may set: fields of Megatron-core's ``TransformerConfig``, by name.

A field is one of three kinds.  ``TAKEN``: another key of ours, or the checkpoint's config.json, says it.
``REFUSED``: it would change the model or its numbers, or needs what the engine does not do.  ``ALLOWED``: it changes
how something is computed, and not what; only these are passed on.  Nothing here imports Megatron; a test compares the
tables with the dataclass, field by field and type by type.  They have the fields of every version in
``MEGATRON_VERSIONS``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_rl.config.megatron_versions import absent_fields, megatron_version
from mcore_rl.config.passed_fields import PassedFields, ValueKind
from mcore_rl.ground.errors import Violation

# Key of ours -> the fields that it sets.  ``config.json`` stands for the model.
TAKEN: dict[str, tuple[str, ...]] = {
    "config.json": (
        "num_layers", "hidden_size", "num_attention_heads", "softmax_scale", "softmax_type", "num_query_groups",
        "ffn_hidden_size", "kv_channels", "layernorm_epsilon", "layernorm_zero_centered_gamma", "add_bias_linear",
        "add_qkv_bias", "gated_linear_unit", "activation_func", "activation_func_clamp_value", "num_moe_experts",
        "rotary_interleaved", "no_rope_freq", "window_size", "window_attn_skip_freq", "normalization", "qk_layernorm",
        "multi_latent_attention", "moe_shared_expert_intermediate_size", "moe_shared_expert_gate", "moe_layer_freq",
        "moe_ffn_hidden_size", "moe_router_topk", "moe_router_num_groups", "moe_router_group_topk",
        "moe_router_pre_softmax", "moe_router_topk_scaling_factor", "moe_router_score_function", "moe_router_dtype",
        "moe_router_enable_expert_bias", "mrope_section", "bias_activation_fusion",
    ),
    "parallel.tp": ("tensor_model_parallel_size", "sequence_parallel"),
    "parallel.pp": ("pipeline_model_parallel_size", "overlap_p2p_comm", "batch_p2p_comm"),
    "parallel.vpp": ("virtual_pipeline_model_parallel_size",),
    "parallel.pipeline_layers": (
        "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "pipeline_model_parallel_layout",
        "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
    ),
    "parallel.cp": ("context_parallel_size",),
    "parallel.ep": ("expert_model_parallel_size",),
    "parallel.etp": ("expert_tensor_parallel_size", "moe_extended_tp"),
    "precision": ("fp16", "bf16", "params_dtype", "pipeline_dtype", "enable_autocast", "autocast_dtype"),
    "layer_spec": ("transformer_impl", "moe_grouped_gemm", "apply_rope_fusion"),
    "recompute": (
        "recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules", "moe_layer_recompute",
    ),
    "moe.dispatcher": ("moe_token_dispatcher_type", "moe_enable_deepep"),
    "moe.flex_backend": ("moe_flex_dispatcher_backend",),
    "moe.permute_fusion": ("moe_permute_fusion",),
    "moe.aux_loss": ("moe_router_load_balancing_type",),
    "moe.aux_loss_coeff": ("moe_aux_loss_coeff",),
    "moe.z_loss_coeff": ("moe_z_loss_coeff",),
    "gradient_accumulation_fusion": ("gradient_accumulation_fusion",),
    "tp_comm_overlap": ("tp_comm_overlap", "tp_comm_bootstrap_backend"),
    "overlap_grad_reduce": ("no_sync_func", "grad_sync_func"),
    "microbatch_tokens": ("variable_seq_lengths", "max_seqlen_per_dp_cp_rank"),
}  # fmt: skip

# Why -> the fields.  Each entry completes "it ...".
REFUSED: dict[str, tuple[str, ...]] = {
    "makes another model of the checkpoint": (
        "mtp_num_layers", "mtp_loss_scaling_factor", "mtp_standalone", "fp32_residual_connection",
        "apply_residual_connection_post_layernorm", "glu_linear_offset", "qk_l2_norm", "attention_output_gate",
        "experimental_attention_variant", "dsa_indexer_n_heads", "dsa_indexer_head_dim",
        "dsa_indexer_topk", "dsa_indexer_loss_coeff", "dsa_indexer_use_sparse_loss", "linear_attention_freq",
        "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads",
        "linear_num_value_heads", "apply_query_key_layer_scaling", "moe_apply_probs_on_input", "moe_latent_size",
        "is_hybrid_model", "mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads",
        "use_mamba_mem_eff_path", "heterogeneous_block_specs", "hetereogenous_dist_checkpoint",
        "use_fused_weighted_squared_relu",
        "dsa_indexer_k_norm_epsilon", "dsa_indexer_k_norm_fp32", "dsa_indexer_rope_interleaved",
        "dsa_indexer_rotate_activation", "dsa_indexer_scoring_relu", "dsa_indexer_skip_topk_offset",
        "dsa_indexer_topk_freq", "dsa_kernel_backend", "mtp_detach_heads", "mtp_hybrid_override_pattern",
        "mtp_use_repeated_layer", "use_mup", "mup_attn_scale_power", "mup_base_head_dim", "mup_base_hidden_size",
        "mup_embedding_mult", "mup_output_mult", "mup_width_mult", "moe_mlp_glu_interleave_size",
        "moe_shared_expert_glu_interleave_size", "mamba_training_ssm_states_dtype",
    ),
    "makes log-probs random, or other than the sampler's": (
        "hidden_dropout", "attention_dropout", "moe_input_jitter_eps", "moe_router_force_load_balancing",
        "moe_token_dropping", "moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity",
        "moe_token_drop_policy", "moe_router_topk_limited_devices", "moe_router_padding_for_quantization",
        "moe_router_padding_for_fp8", "moe_router_force_biased", "moe_expert_rank_capacity_factor",
    ),
    "changes weights beside the optimizer": (
        "qk_clip", "qk_clip_alpha", "qk_clip_threshold", "log_max_attention_logit",
    ),
    "is read by layers that the engine does not use": (
        "masked_softmax_fusion", "attention_softmax_in_fp32", "persist_layer_norm", "memory_efficient_layer_norm",
    ),
    "needs process groups that the engine does not make": (
        "hierarchical_context_parallel_sizes", "pipeline_model_parallel_comm_backend",
        "gtp_weight_remat_size", "expert_gtp_weight_remat_size", "tensor_parallel_num_weight_shards",
        "expert_tensor_parallel_num_weight_shards",
    ),
    "works without sequence parallelism alone, and parallel.tp always has it": ("distribute_saved_activations",),
    "computes in a precision that the engine does not prepare weights for": (
        "activation_func_fp8_input_store", "fp8", "fp8_recipe", "fp8_param", "fp8_quantizer_factory", "fp8_margin",
        "fp8_interval", "fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_wgrad", "fp8_dot_product_attention",
        "fp8_multi_head_attention", "tp_only_amax_red", "first_last_layers_bf16", "num_layers_at_start_in_bf16",
        "num_layers_at_end_in_bf16", "use_kitchen", "use_kitchen_attention", "kitchen_attention_backend", "fp4",
        "fp4_recipe", "fp4_param", "fp4_quantizer_factory", "quant_recipe", "disable_parameter_transpose_cache",
        "fp8_output_proj",
    ),
    "changes how losses and gradients are summed, which makes them the same under every layout": (
        "calculate_per_token_loss", "cross_entropy_loss_fusion", "cross_entropy_fusion_impl", "grad_scale_func",
        "finalize_model_grads_func", "moe_grad_scale_func", "mtp_grad_scale_func",
        "experimental_attention_variant_loss_scale_func",
    ),
    "concerns weights that are replaced by the checkpoint's": (
        "init_method", "output_layer_init_method", "init_method_std", "embedding_init_method",
        "embedding_init_method_std", "init_model_with_meta_device", "perform_initialization",
        "use_cpu_initialization",
    ),
    "is read by Megatron's router, and the engine's own chooses experts and has the losses": (
        "moe_router_fusion", "moe_router_bias_update_rate", "moe_enable_routing_replay",
        "moe_router_quantile_balancing_ema",
    ),
    "needs microbatches of one shape, and packed ones differ": (
        "enable_cuda_graph", "cuda_graph_use_single_mempool", "cuda_graph_retain_backward_graph",
        "cuda_graph_warmup_steps", "external_cuda_graph", "cuda_graph_impl", "cuda_graph_scope", "use_te_rng_tracker",
        "symmetric_ar_type",
        "cuda_graph_modules", "delay_offload_until_cuda_graph", "moe_pad_experts_for_cuda_graph_inference",
        "moe_ncclep_static_shape", "moe_ncclep_zero_copy", "moe_paged_stash", "moe_paged_stash_page_size",
        "moe_paged_stash_buffer_size_factor_cpu", "moe_paged_stash_buffer_size_factor_cuda",
    ),
    "needs another pipeline schedule or step than the engine's": (
        "param_sync_func", "overlap_moe_expert_parallel_comm", "delay_wgrad_compute",
        "ep_overlap_early_attn_memory_release", "defer_embedding_wgrad_compute", "wgrad_deferral_limit",
        "num_microbatches_with_partial_activation_checkpoints", "timers", "barrier_with_L1_time",
        "moe_per_layer_logging", "hybrid_context_parallel", "cpu_offloading", "cpu_offloading_num_layers",
        "_cpu_offloading_context",
        "cpu_offloading_activations", "cpu_offloading_weights", "cpu_offloading_double_buffering",
        "cpu_offloading_retain_pinned_cpu_buffers", "overlap_dispatch_backward_with_experts_wgrad",
        "high_priority_a2a_comm_stream",
    ),
    "is for inference, and vLLM samples": (
        "flash_decode", "inference_rng_tracker", "inference_sampling_seed", "use_inference_optimized_layers",
        "inference_fuse_tp_communication", "mlp_chunks_for_prefill",
        "inference_cuda_graph_scope", "inference_disable_triton_nvls_kernels", "inference_grouped_gemm_backend",
        "inference_moe_disable_fused_quant_kernels", "inference_moe_token_dispatcher_type",
        "nccl_all_reduce_for_prefill",
    ),
    "is for Megatron's own tests or tools": ("test_mode", "config_logger_dir"),
    "keeps weights in other tensors than the tables of weights know": (
        "moe_single_grouped_bias", "moe_single_grouped_weight", "use_grouped_gemm_for_dense_mlp",
        "use_grouped_gemm_for_shared_expert", "use_transformer_engine_op_fuser",
    ),
    "is deprecated, and ignored or gone": (
        "tp_comm_split_ag", "tp_comm_atomic_ag", "tp_comm_split_rs", "tp_comm_atomic_rs",
        "async_tensor_model_parallel_allreduce", "moe_use_legacy_grouped_gemm", "use_ring_exchange_p2p",
    ),
}  # fmt: skip

# Field -> the types of its values; a tuple of strings lists the values.
ALLOWED: dict[str, ValueKind] = {
    "activation_offload_fraction": float,
    "attention_backend": ("flash", "fused", "unfused", "local", "auto"),
    "batch_invariant_mode": bool,
    "batch_p2p_sync": bool,
    "bias_dropout_fusion": bool,
    "clone_scatter_output_in_embedding": bool,
    "cp_comm_type": ("p2p", "all_gather", "a2a"),
    "deallocate_pipeline_outputs": bool,
    "delta_offload_bytes_across_pp_ranks": int,
    "deterministic_mode": bool,
    "disable_bf16_reduced_precision_matmul": bool,
    "fine_grained_activation_offloading": bool,
    "fine_grained_offloading_max_inflight_offloads": int,
    "flash_attention_version": (2, 3, 4),
    "fused_residual_rmsnorm": bool,
    "fused_single_qkv_rope": bool,
    "microbatch_group_size_per_vp_stage": int,
    "min_offloaded_tensor_size": int,
    "mlp_chunks_for_training": int,
    "moe_deepep_num_sms": int,
    "moe_flex_dispatcher_num_sms": int,
    "moe_hybridep_num_blocks_permute": int,
    "moe_hybridep_num_blocks_unpermute": int,
    "moe_hybridep_num_sms": int,
    "moe_hybridep_num_sms_preprocessing": int,
    "moe_hybridep_pad_uneven_dispatch_inputs": bool,
    "moe_permute_fusion_into_hybridep": bool,
    "moe_shared_expert_overlap": bool,
    "offload_modules": list,
    "overlap_p2p_comm_warmup_flush": bool,
    "tp_comm_bulk_dgrad": bool,
    "tp_comm_bulk_wgrad": bool,
    "tp_comm_overlap_ag": bool,
    "tp_comm_overlap_disable_fc1": bool,
    "tp_comm_overlap_disable_qkv": bool,
    "tp_comm_overlap_rs": bool,
    "tp_comm_overlap_rs_dgrad": bool,
    "use_te_activation_func": bool,
}


MEGATRON_FIELDS = PassedFields("Megatron-core's TransformerConfig", "megatron", TAKEN, REFUSED, ALLOWED)


def megatron_violations(fields: Mapping[str, Any], key: str = "megatron") -> list[Violation]:
    """Every field of ``fields`` that may not be set, and every value of another type.  key: the dotted prefix."""
    absent = ALLOWED.keys() & fields.keys() & absent_fields()
    problem = f"megatron-core {megatron_version()} has no such field" if absent else ""
    others = {name: value for name, value in fields.items() if name not in absent}
    return [
        *MEGATRON_FIELDS.violations(others, key),
        *(Violation(f"{key}.{name}", fields[name], problem, "Leave it out") for name in sorted(absent)),
    ]
