"""What ``rollout.engine={FIELD: VALUE}`` may set: arguments of vLLM 0.32's engine (``AsyncEngineArgs``), by name.

Only what changes how an engine computes, and not what, is passed on.  Nothing here imports vLLM; a test compares the
tables with its dataclass, field by field.
"""

from __future__ import annotations

from mcore_rl.config.passed_fields import PassedFields, ValueKind

# Key of ours -> the fields that it sets; one with a dot before it is no key of ``rollout``.
TAKEN: dict[str, tuple[str, ...]] = {
    ".model.path": (
        "model", "model_weights", "served_model_name", "hf_config_path", "revision", "code_revision", "config_format",
        "hf_token", "download_dir", "ignore_patterns", "runner", "convert", "generation_config",
        "override_generation_config",
    ),
    ".model.tokenizer_path": ("tokenizer", "tokenizer_mode", "tokenizer_revision", "skip_tokenizer_init"),
    ".model.config_overrides": ("hf_overrides", "model_class_overrides", "disable_sliding_window"),
    "tp": (
        "tensor_parallel_size", "distributed_executor_backend", "nnodes", "node_rank", "master_addr", "master_port",
        "device_ids", "worker_cls", "worker_extension_cls",
    ),
    "dp": (
        "data_parallel_size", "data_parallel_rank", "data_parallel_start_rank", "data_parallel_size_local",
        "data_parallel_address", "data_parallel_rpc_port", "data_parallel_hybrid_lb", "data_parallel_external_lb",
        "data_parallel_multi_port_external_lb", "data_parallel_backend", "_api_process_count", "_api_process_rank",
    ),
    "ep": ("enable_expert_parallel", "expert_placement_strategy"),
    "dtype": ("dtype",),
    "seed": ("seed",),
    "max_response_length": ("max_model_len",),
    "gpu_memory_utilization": ("gpu_memory_utilization",),
    "kv_cache_memory_bytes": ("kv_cache_memory_bytes", "num_gpu_blocks_override"),
    "max_num_seqs": ("max_num_seqs",),
    "max_num_batched_tokens": ("max_num_batched_tokens",),
    "enable_prefix_caching": ("enable_prefix_caching",),
    "enforce_eager": ("enforce_eager",),
    "enable_sleep_mode": ("enable_sleep_mode", "enable_cumem_allocator"),
    "moe_backend": ("moe_backend",),
    "quantization": ("quantization", "quantization_config"),
    "return_routed_experts": ("enable_return_routed_experts",),
}  # fmt: skip

# Why -> the fields.  Each entry completes "it ...".
REFUSED: dict[str, tuple[str, ...]] = {
    "runs code that comes with a checkpoint, or that the engine's process would look for": (
        "trust_remote_code", "scheduler_cls", "logits_processors", "io_processor_plugin", "reasoning_parser_plugin",
        "model_impl",
    ),
    "changes how weights are loaded or held, and updates write them as the checkpoint has them": (
        "load_format", "model_loader_extra_config", "linear_backend",
        "allow_deprecated_quantization", "pt_load_map_location", "weight_transfer_config", "enable_ep_weight_filter",
        "offload_backend", "cpu_offload_gb", "cpu_offload_params", "offload_group_size", "offload_num_in_group",
        "offload_prefetch_step", "offload_params", "sleep_preserve_parameter_names", "sleep_mode_offload_cudagraph",
    ),
    "moves experts between ranks, where updates do not look for them": (
        "enable_eplb", "eplb_config", "enable_elastic_ep", "elastic_ep_max_dp_size",
    ),
    "makes a layout that rollout.tp, dp and ep do not describe": (
        "pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size", "dcp_comm_backend",
        "dcp_q_replicate", "dcp_kv_cache_interleave_size", "cp_kv_cache_interleave_size", "enable_hc_sp",
        "enable_batch_sharded_sampling",
    ),
    "makes log-probs other than those of the distribution that tokens are drawn from": (
        "logprobs_mode", "max_logprobs", "use_fp64_gumbel", "speculative_config", "spec_method", "spec_model",
        "spec_tokens", "per_request_spec_decode_metrics", "return_sampling_mask", "watermark_config", "watermark",
        "reasoning_config", "reasoning_parser", "structured_outputs_config", "kv_sharing_fast_prefill",
        "swa_bounded_replay", "enable_trace_replay",
    ),
    "computes attention or its cache in a precision whose scales an engine without weights never reads": (
        "kv_cache_dtype", "kv_cache_dtype_skip_layers", "mamba_cache_dtype", "mamba_ssm_cache_dtype",
        "enable_mamba_cache_stochastic_rounding", "mamba_cache_philox_rounds",
    ),
    "keeps a cache where an update does not empty it": (
        "kv_transfer_config", "kv_events_config", "kv_offloading_size", "kv_offloading_backend", "ec_transfer_config",
        "ec_manager_config", "prefix_cache_retention_interval", "engram_config", "mamba_cache_mode",
        "enable_mamba_shared_prefix_checkpoint", "replayssm_buffer_len", "use_replayssm", "mamba_block_size",
        "prefix_match_unit", "mamba_config",
    ),
    "is for adapters, images, classifiers or servers, which the engine does not have": (
        "enable_lora", "max_loras", "max_lora_rank", "default_mm_loras", "fully_sharded_loras", "max_cpu_loras",
        "lora_dtype", "lora_target_modules", "enable_tower_connector_lora", "specialize_active_lora",
        "enable_mixed_moe_lora_format", "enable_moe_shared_loras", "max_lora_cls_labels", "pooler_config",
        "enable_prompt_embeds", "allowed_local_media_path", "allowed_media_domains", "language_model_only",
        "limit_mm_per_prompt", "enable_mm_embeds", "interleave_mm_strings", "media_io_kwargs", "mm_processor_kwargs",
        "mm_processor_cache_gb", "mm_processor_cache_type", "mm_hasher_algorithm",
        "mm_shm_cache_max_object_size_mb", "mm_encoder_only", "mm_encoder_tp_mode", "mm_encoder_attn_backend",
        "mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path", "mm_encoder_fp8_scale_save_path",
        "mm_encoder_fp8_scale_save_margin", "renderer_num_workers", "skip_mm_profiling", "video_pruning_rate",
        "video_pruning_method", "mm_tensor_ipc", "mm_processor_device", "mm_ipc_gpu_memory_gb",
        "mm_device_do_normalize", "disable_chunked_mm_input", "enable_mm_processor_stats", "diffusion_config",
        "tokens_only", "max_num_queued_reqs", "max_num_queued_tokens", "enable_shm_tensor_arena",
    ),
    "changes how the engine starts, logs, traces or ends, which the run looks after": (
        "disable_log_stats", "aggregate_engine_logging", "enable_log_requests", "enable_logging_iteration_details",
        "show_hidden_metrics_for_version", "otlp_traces_endpoint", "collect_detailed_traces", "kv_cache_metrics",
        "kv_cache_metrics_sample", "custom_histogram_buckets", "cudagraph_metrics", "enable_layerwise_nvtx_tracing",
        "enable_mfu_metrics", "profiler_config", "logging_config", "log_level", "log_config_file",
        "ray_workers_use_nsight", "use_tqdm_on_load", "shutdown_timeout", "fail_on_environ_validation",
        "fault_tolerance_config", "enable_fault_tolerance", "additional_config", "aux_output_config",
        "jit_monitor_mode", "jit_monitor_verbose", "enable_nccl_comm_suspend", "max_parallel_loading_workers",
        "stream_interval", "scheduling_policy",
    ),
}  # fmt: skip

TOWER_GRAPHS = "cudagraph_mm_encoder"  # of ``compilation_config``
# Field -> the type of its values, as vLLM's annotation has it.
ALLOWED: dict[str, ValueKind] = {
    "all2all_backend": str,
    "async_scheduling": bool,
    "attention_backend": str,
    "attention_config": dict,
    "block_size": int,
    "compilation_config": dict,
    "cpu_distributed_timeout_seconds": int,
    "cudagraph_capture_sizes": list,
    "dbo_decode_token_threshold": int,
    "dbo_prefill_token_threshold": int,
    "disable_cascade_attn": bool,
    "disable_custom_all_reduce": bool,
    "disable_hybrid_kv_cache_manager": bool,
    "disable_nccl_for_dp_synchronization": bool,
    "distributed_timeout_seconds": int,
    "dp_sync_interval": int,
    "enable_chunked_prefill": bool,
    "enable_dbo": bool,
    "enable_flashinfer_autotune": bool,
    "gdn_prefill_backend": str,
    "ir_op_priority": dict,
    "kda_decode_backend": str,
    "kda_prefill_backend": str,
    "kernel_config": dict,
    "long_prefill_token_threshold": int,
    "long_prefill_token_threshold_adaptive": bool,
    "mamba_backend": str,
    "mamba_ssu_algorithm": str,
    "max_cudagraph_capture_size": int,
    "max_num_active_seqs": int,
    "max_num_scheduled_tokens": int,
    "numa_bind": bool,
    "numa_bind_cpus": list,
    "numa_bind_nodes": list,
    "optimization_level": int,
    "performance_mode": str,
    "prefill_schedule_interval": int,
    "prefix_caching_hash_algo": str,
    "safetensors_load_strategy": str,
    "safetensors_prefetch_block_size": int,
    "safetensors_prefetch_num_threads": int,
    "scheduler_reserve_full_isl": bool,
    "sparse_indexer_topk_backend": str,
    "ubatch_size": int,
}
VLLM_FIELDS = PassedFields("vLLM 0.32's AsyncEngineArgs", "engine", TAKEN, REFUSED, ALLOWED)
# Which the engine sets itself on a CPU: why is in rollout/vllm/engine/environment.py.
OURS_ON_CPU = ("enable_chunked_prefill", "compilation_config")
