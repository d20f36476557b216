"""The rows of models that verl trains or scores with, model, actor, reference, critic, and of their engine."""

from __future__ import annotations

from mcore_rl.from_verl.row import KeyRow, absent, gone, of_names, part, to

ACTOR = "actor_rollout_ref.actor"
FILES = "the Hugging Face files are read in any layout"
PACKED = "always packed, without padding"
BY_ITSELF = "weights, gradients and optimizer states leave the devices by themselves while engines have them"
QAT = "not yet: nothing is quantised in training"
MUON = "adamw, and muon by `optim.optimizer`, whose momentum and steps are not verl's"
FLOAT32 = "main weights, gradients and Adam's moments are float32"
FSDP = "Megatron shards by `parallel`: mcore-rl plan --search finds a layout"
FSDP_CP = "context parallelism; verl's of FSDP"
UPDATES = "optimizer steps, where verl counts steps of the run: times minibatches and epochs of a step"
ENTROPY = "entropies are always measured, piece by piece"
PIPELINE = "layers of every chunk, in order; from-verl writes them if it knows the model, by its name or its folder"
RESUME = "a checkpoint has everything that a bitwise resume needs"
VISION = "`True` is `frozen`; else the tower is trained, but beside adapters (docs/vision.md)"
ADAPTERS_ALONE = "always: beside adapters no other weight is trained, and the vision tower has none"
FROZEN = of_names({"True": None}, ADAPTERS_ALONE)
MTP = "not yet: layers for more than the next token are left out"
REMOTE = "code of a checkpoint is never run: families are written here (docs/models.md)"
MICROBATCHES = (
    "one budget of tokens for each context-parallel group, which packed sequences fill; log-probs and the reference "
    "take the actor's. With use_dynamic_bsz: ppo_max_token_len_per_gpu times context_parallel_size. Without: what "
    "ppo_micro_batch_size_per_gpu of the longest sequences have. The numbers of a run do not depend on it"
)


def optimizer(verl: str, ours: str) -> list[KeyRow]:
    """The rows of a group ``optim``: Megatron's and FSDP's."""
    adam = of_names({"adam": None, "AdamW": None, "adamw": None, "Adam": None}, MUON)
    return [
        to(f"{verl}.lr", f"{ours}.lr"),
        to(f"{verl}.betas", f"{ours}.betas"),
        to(
            f"{verl}.weight_decay",
            f"{ours}.weight_decay",
            note="biases and norms are exempt, as in Megatron; FSDP decays all",
        ),
        to(f"{verl}.clip_grad", f"{ours}.clip_grad"),
        part(
            f"{verl}.{{lr_warmup_steps,lr_warmup_steps_ratio}}",
            f"{ours}.lr_warmup_steps {ours}.warmup_ratio",
            "warmup",
            f"{UPDATES}; a share of the run stays one",
        ),
        part(
            f"{verl}.{{lr_decay_style,warmup_style,lr_scheduler_type}}",
            f"{ours}.lr_schedule",
            "decay",
            "`constant`, `linear`, `cosine`; `WSD` and `inverse-square-root` are not here. Megatron's was `linear` by "
            "default in 0.4.1",
        ),
        part(
            f"{verl}.{{lr_decay_steps,total_training_steps}}",
            f"{ours}.total_steps",
            "decay",
            f"{UPDATES}; left out, it follows from the run",
        ),
        part(f"{verl}.{{min_lr,min_lr_ratio}}", f"{ours}.min_lr_ratio", "decay", "a share of `lr`: min_lr / lr"),
        absent(f"{verl}.lr_warmup_init", "warm-up begins at lr / lr_warmup_steps"),
        gone(
            f"{verl}.{{lr_wsd_decay_style,lr_wsd_decay_steps}}", "read with lr_decay_style=WSD alone, which is not here"
        ),
        absent(f"{verl}.num_cycles", "a cosine is half a cycle"),
        gone(f"{verl}.weight_decay_incr_style", "verl begins and ends with the same weight decay: it changes nothing"),
        gone(
            f"{verl}.use_checkpoint_opt_param_scheduler",
            "rates follow from the configuration and the step, resumed or not",
        ),
        KeyRow(f"{verl}.optimizer", (), MUON, adam, absent=True),
        gone(f"{verl}.{{optimizer_impl,zero_indexed_step}}", "Megatron's AdamW"),
        gone(f"{verl}.muon_*", "read with optimizer=dist_muon alone, whose momentum and steps are not ours"),
        gone(f"{verl}.use_precision_aware_optimizer", FLOAT32),
        absent(f"{verl}.{{exp_avg_dtype,exp_avg_sq_dtype,main_grads_dtype}}", FLOAT32),
        absent(f"{verl}.use_layer_wise_distributed_optimizer", "the distributed optimizer shards every tensor"),
        gone(f"{verl}.override_optimizer_config", "an empty group"),
        to(f"{verl}.override_optimizer_config.adam_eps", f"{ours}.eps"),
        part(f"{verl}.override_optimizer_config.{{adam_beta1,adam_beta2}}", f"{ours}.betas", "betas"),
        gone(
            f"{verl}.override_optimizer_config."
            "{optimizer_cpu_offload,optimizer_offload_fraction,overlap_cpu_optimizer_d2h_h2d}",
            f"AdamW steps on the devices; {BY_ITSELF}",
        ),
        gone(f"{verl}.override_optimizer_config.use_precision_aware_optimizer", FLOAT32),
        absent(f"{verl}.override_optimizer_config.*", "fields of Megatron's OptimizerConfig are not passed on"),
    ]


def layout(verl: str, ours: str) -> list[KeyRow]:
    """The rows of a role's parallel axes."""
    return [
        to(f"{verl}.tensor_model_parallel_size", f"{ours}.parallel.tp", note="always with sequence parallelism"),
        to(f"{verl}.pipeline_model_parallel_size", f"{ours}.parallel.pp"),
        part(
            f"{verl}.virtual_pipeline_model_parallel_size",
            f"{ours}.parallel.vpp",
            "chunks",
            "chunks of a stage, in both",
        ),
        to(f"{verl}.context_parallel_size", f"{ours}.parallel.cp"),
        to(f"{verl}.expert_model_parallel_size", f"{ours}.parallel.ep"),
        part(
            f"{verl}.expert_tensor_parallel_size",
            f"{ours}.parallel.etp",
            "experts",
            "None is Megatron's tensor_model_parallel_size, and 1 here; from-verl writes it with ep above 1",
        ),
    ]


def engine(verl: str) -> list[KeyRow]:
    """The rows of Megatron's engine that need nothing here, or are not here."""
    return [
        gone(f"{verl}.sequence_parallel", "always, with parallel.tp"),
        gone(f"{verl}.{{param_offload,grad_offload,optimizer_offload}}", BY_ITSELF),
        gone(f"{verl}.use_distributed_optimizer", "always"),
        gone(
            f"{verl}.{{use_mbridge,vanilla_mbridge,use_dist_checkpointing,dist_checkpointing_path,dist_checkpointing_prefix,"
            "dist_ckpt_optim_fully_reshardable,distrib_optim_fully_reshardable_mem_efficient}",
            FILES,
        ),
        gone(f"{verl}.forward_only", "follows from the role"),
        gone(f"{verl}.{{use_remove_padding,pad_bshd_to_minibatch_max,pad_to_length,pad_to_length_bucket}}", PACKED),
        absent(f"{verl}.dynamic_context_parallel", "one context-parallel size for the whole run"),
        gone(f"{verl}.max_seqlen_per_dp_cp_rank", "read with dynamic_context_parallel alone"),
        gone(f"{verl}.use_megatron_fsdp", FSDP),
        *quantisation(verl),
        *router_replay(verl),
        gone(f"{verl}.{{entropy_from_logits_chunk_size,entropy_from_logits_with_chunking}}", ENTROPY),
    ]


def quantisation(verl: str) -> list[KeyRow]:
    """The rows of a group ``qat``."""
    return [
        absent(f"{verl}.qat.enable", QAT),
        gone(
            f"{verl}.qat.{{activation_observer,group_size,ignore_patterns,mode,quantization_config_path}}",
            "read with qat.enable alone",
        ),
    ]


def router_replay(verl: str) -> list[KeyRow]:
    """The rows of a group ``router_replay``: the actor's is a key here, no other role replays."""
    mode = f"{verl}.router_replay.mode"
    modes = of_names({"disabled": "off", "R2": "r2", "R3": "r3"}, "disabled, R2 and R3 are here")
    return [
        to(mode, "actor.router_replay", modes) if verl.startswith(ACTOR) else gone(mode, "its routers choose freely"),
        gone(f"{verl}.router_replay.{{record_file,replay_file}}", "choices go from pass to pass in memory"),
    ]


PRECISION = of_names(
    {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32"},
    "bfloat16 and float32 are here",
)


def megatron(verl: str, ours: str) -> list[KeyRow]:
    """The rows of the group ``megatron`` of a role that is trained."""
    fields = f"{verl}.override_transformer_config"
    return [
        *layout(verl, ours),
        *engine(verl),
        to(f"{verl}.seed", f"{ours}.seed", note="of weights that no checkpoint has", keeps=True),
        to(f"{verl}.dtype", f"{ours}.precision", PRECISION),
        part(
            f"{fields}.{{recompute_granularity,recompute_method,recompute_num_layers,recompute_modules}}",
            f"{ours}.recompute",
            "recompute",
            "`none`, `selective` (core attention), `full` (each layer)",
        ),
        part(
            f"{fields}.{{num_layers_in_first_pipeline_stage,num_layers_in_last_pipeline_stage,"
            "account_for_embedding_in_pipeline_split,account_for_loss_in_pipeline_split,pipeline_model_parallel_layout}",
            f"{ours}.parallel.pipeline_layers",
            "pipeline",
            PIPELINE,
        ),
        part(
            f"{fields}.{{moe_token_dispatcher_type,moe_enable_deepep,moe_flex_dispatcher_backend}}",
            f"{ours}.moe.dispatcher {ours}.moe.flex_backend",
            "dispatcher",
            "`allgather`, `alltoall`, or `flex` with DeepEP or HybridEP",
        ),
        to(f"{fields}.moe_permute_fusion", f"{ours}.moe.permute_fusion", note="where Transformer Engine is, by itself"),
        part(
            f"{fields}.{{moe_aux_loss_coeff,moe_router_load_balancing_type}}",
            f"{ours}.moe.aux_loss {ours}.moe.aux_loss_coeff",
            "balance",
            "over each sequence or the whole batch; Megatron's over a micro batch depends on the layout",
            differs=True,
        ),
        to(f"{fields}.moe_z_loss_coeff", f"{ours}.moe.z_loss_coeff"),
        part(
            f"{fields}.gradient_accumulation_fusion",
            f"{ours}.gradient_accumulation_fusion",
            "transformer_field",
            "by itself on accelerators; false switches it off",
        ),
        part(f"{fields}.tp_comm_overlap", f"{ours}.tp_comm_overlap", "transformer_field"),
        part(
            f"{fields}.*",
            f"{ours}.megatron",
            "transformer_field",
            "fields that change no number; others follow from a key of ours, or are refused with the reason",
        ),
        part(fields, f"{ours}.megatron", "transformer_field", "an empty group"),
        to(
            f"{verl}.override_ddp_config.overlap_grad_reduce",
            f"{ours}.overlap_grad_reduce",
            note="on accelerators by itself",
        ),
        gone(f"{verl}.override_ddp_config", "an empty group"),
        gone(f"{verl}.override_ddp_config.*", "gradients are reduced in float32, in buckets of Megatron's size"),
        absent(f"{verl}.override_mcore_model_config", "config.json says what the model is"),
        absent(f"{verl}.override_mcore_model_config.*", "config.json says what the model is"),
    ]


def profiler(verl: str) -> list[KeyRow]:
    """The rows of a role's profilers."""
    return [
        gone(
            f"{verl}.{{profile,profiler}}.*", "trainer.profile_steps traces steps of the trainer with torch's profiler"
        )
    ]


def trained(verl: str, ours: str) -> list[KeyRow]:
    """The rows of a role that is trained.  verl, ours: its group in each."""
    return [
        to(f"{verl}.ppo_mini_batch_size", f"{ours}.ppo_mini_batch_size", note="prompts, also here"),
        to(f"{verl}.ppo_epochs", f"{ours}.ppo_epochs"),
        to(f"{verl}.shuffle", f"{ours}.shuffle", note="before the second and later epochs"),
        part(
            f"{verl}.{{use_dynamic_bsz,ppo_max_token_len_per_gpu,ppo_micro_batch_size_per_gpu,ppo_micro_batch_size}}",
            f"{ours}.microbatch_tokens",
            "microbatches",
            MICROBATCHES,
        ),
        part(
            f"{verl}.loss_agg_mode",
            f"{ours}.loss_agg_mode",
            "aggregation",
            "`seq-mean-token-sum-norm` is `sum_over_constant`; over the whole minibatch, however it is cut (verl until "
            "0.6 took means of micro batches). `geo_mean` is always `seq_mean_token_mean`",
        ),
        part(
            f"{verl}.loss_scale_factor",
            f"{ours}.loss_agg_constant",
            "aggregation",
            "None is `data.max_response_length` in both",
        ),
        gone(f"{verl}.data_loader_seed", "data.seed is the seed of the data"),
        gone(f"{verl}.rollout_n", "rollout.n is there once"),
        gone(f"{verl}.strategy", "Megatron trains"),
        gone(f"{verl}.load_weight", "weights are always loaded"),
        gone(f"{verl}.checkpoint.{{contents,save_contents,load_contents,strict}}", RESUME),
        gone(f"{verl}.checkpoint.mbridge_config", FILES),
        gone(f"{verl}.checkpoint.mbridge_config.*", FILES),
        *optimizer(f"{verl}.optim", f"{ours}.optim"),
        *megatron(f"{verl}.megatron", ours),
        gone(f"{verl}.{{fsdp_config,fsdp}}.*", FSDP),
        to(f"{verl}.ulysses_sequence_parallel_size", f"{ours}.parallel.cp", note=FSDP_CP),
        to(f"{verl}.grad_clip", f"{ours}.optim.clip_grad", note="verl's of FSDP"),
        *profiler(verl),
    ]


def adapters(verl: str, ours: str) -> list[KeyRow]:
    """The rows of adapters and of layers for more tokens."""
    keys = " ".join(f"{ours}.lora.{name}" for name in ("rank", "alpha", "target_modules", "exclude_modules", "path"))
    return [
        part(
            f"{verl}.{{lora_rank,lora_alpha,target_modules,exclude_modules,lora_adapter_path}}",
            keys,
            "lora",
            "PEFT's, as with verl's FSDP; engines apply them where vLLM can (rollout.lora)",
        ),
        part(
            f"{verl}.lora.{{rank,alpha,target_modules,exclude_modules,merge,type,dropout,lora_A_init_method,adapter_path}}",
            f"{keys} {ours}.lora.init{' rollout.lora' if verl.startswith('actor') else ''}",
            "lora",
            "Megatron-Bridge's adapters become PEFT's of the same rank, scale and layers (linear_qkv is q_proj, k_proj "
            "and v_proj), each with an A of its own",
        ),
        gone(
            f"{verl}.lora.{{a2a_experimental,dropout_position,dtype,lora_B_init_method}}",
            "B begins at 0, and adapters are float32",
        ),
        KeyRow(
            f"{verl}.lora.{{freeze_language_model,freeze_vision_model,freeze_vision_projection}}",
            (),
            ADAPTERS_ALONE,
            FROZEN,
        ),
        absent(f"{verl}.mtp.{{enable,enable_train,enable_rollout}}", MTP),
        gone(
            f"{verl}.mtp.{{detach_encoder,method,mtp_loss_scaling_factor,num_speculative_tokens,speculative_algorithm,"
            "speculative_eagle_topk,speculative_num_draft_tokens,speculative_num_steps}",
            "read with mtp.enable alone",
        ),
    ]


def model(verl: str, ours: str) -> list[KeyRow]:
    """The rows of a group ``model``.  ours: the role that recomputes."""
    return [
        *adapters(verl, ours),
        part(
            f"{verl}.enable_gradient_checkpointing",
            f"{ours}.recompute",
            "recompute",
            "`full` with FSDP; Megatron's workers read override_transformer_config.recompute_* instead",
        ),
        part(
            f"{verl}.gradient_checkpointing_kwargs.{{activations_checkpoint_granularity,activations_checkpoint_method,"
            "activations_checkpoint_num_layers}",
            f"{ours}.recompute",
            "recompute",
            "Megatron's in 0.4",
        ),
        gone(f"{verl}.enable_activation_offload", "recompute frees the memory of activations"),
        gone(f"{verl}.{{use_remove_padding,use_fused_kernels,use_liger}}", PACKED),
        gone(f"{verl}.{{fused_kernel_options,tiled_mlp}}.*", "layers are Transformer Engine's where it is installed"),
        gone(f"{verl}.use_shm", "the files are mapped"),
        gone(f"{verl}.trust_remote_code", REMOTE),
        absent(f"{verl}.external_lib", "no module is imported for a model"),
        absent(f"{verl}.custom_chat_template", "the tokenizer's folder has the template: change it in your copy"),
        absent(
            f"{verl}.hf_config_path", "config.json beside the weights is read; model.config_overrides changes fields"
        ),
        gone(f"{verl}.override_config", "an empty group"),
        gone(f"{verl}.override_config.model_config", "an empty group"),
        absent(f"{verl}.override_config.moe_config.freeze_moe_router", "not yet: all weights are trained"),
    ]


CLIP = "verl reads clip_ratio_low and clip_ratio_high, which are 0.2 unless written, and clip_ratio if they are null"
KL = {
    "kl": "k1",
    "k1": "k1",
    "mse": "k2",
    "k2": "k2",
    "k3": "low_var_kl",
    "low_var_kl": "low_var_kl",
    "kl+": "k1_plus",
    "k1+": "k1_plus",
    "k3+": "k3_plus",
    "low_var_kl+": "k3_plus",
    "mse+": "k2",
    "k2+": "k2",
    "full": "full",
}
NO_SUCH_KL = "there is no estimate of that name here"
LOSSES = {name: name for name in ("gspo", "geo_mean", "sapo", "gpg", "cispo", "clip_cov", "kl_cov")} | {
    "vanilla": "ppo_clip",
    "bypass_mode": "ppo_clip",
}
COVARIANCE = "of all tokens of the step, chosen before its first update; verl chooses in each micro batch"

MODEL_ROWS = [
    to("actor_rollout_ref.model.path", "model.path", needed=True),
    to("actor_rollout_ref.model.tokenizer_path", "model.tokenizer_path"),
    to(
        "actor_rollout_ref.model.override_config.model_config.*", "model.config_overrides", note="fields of config.json"
    ),
    to("actor_rollout_ref.model.override_config.*", "model.config_overrides", note="fields of config.json"),
    *model("actor_rollout_ref.model", "actor"),
]

ACTOR_ROWS = [
    *trained(ACTOR, "actor"),
    part(
        f"{ACTOR}.{{clip_ratio,clip_ratio_low,clip_ratio_high}}",
        "actor.clip_ratio actor.clip_ratio_low actor.clip_ratio_high",
        "clip",
        CLIP,
    ),
    to(f"{ACTOR}.clip_ratio_c", "actor.clip_ratio_c", note="`null`: no dual clip"),
    part(f"{ACTOR}.policy_loss.loss_mode", "actor.loss_mode", "loss", "`vanilla` is `ppo_clip`"),
    to(f"{ACTOR}.policy_loss.clip_cov_ratio", "actor.clip_cov_ratio", note=COVARIANCE, differs=True),
    to(f"{ACTOR}.policy_loss.clip_cov_lb", "actor.clip_cov_lb"),
    to(f"{ACTOR}.policy_loss.clip_cov_ub", "actor.clip_cov_ub"),
    to(f"{ACTOR}.policy_loss.kl_cov_ratio", "actor.kl_cov_ratio", note=COVARIANCE, differs=True),
    to(f"{ACTOR}.policy_loss.ppo_kl_coef", "actor.ppo_kl_coef"),
    gone(f"{ACTOR}.policy_loss.dro_beta", "read with loss_mode=dro alone, which is not here"),
    to(
        f"{ACTOR}.tau_pos",
        "actor.tau_pos",
        note="`sapo` is aggregated as loss_agg_mode says; verl's always as seq-mean-token-mean",
    ),
    to(f"{ACTOR}.tau_neg", "actor.tau_neg"),
    to(f"{ACTOR}.policy_loss.tau_pos", "actor.tau_pos", note="verl's scripts write it, and verl reads actor.tau_pos"),
    to(f"{ACTOR}.policy_loss.tau_neg", "actor.tau_neg", note="as tau_pos"),
    gone(f"{ACTOR}.model_engine", "Megatron"),
    to(f"{ACTOR}.entropy_coeff", "actor.entropy_coeff", note="0.001 was verl's default until 2025-05-30"),
    to(f"{ACTOR}.use_kl_loss", "actor.use_kl_loss"),
    to(f"{ACTOR}.kl_loss_coef", "actor.kl_loss_coef"),
    to(
        f"{ACTOR}.kl_loss_type",
        "actor.kl_loss_type",
        of_names(KL, NO_SUCH_KL),
        "`kl`, `mse`, `full` are `k1`, `k2`, `full`; verl's `k3` is its `low_var_kl`, as that here",
    ),
    to(f"{ACTOR}.checkpoint.async_save", "trainer.async_save", keeps=True),
    gone(f"{ACTOR}.{{use_torch_compile,use_fused_kernels,use_remove_padding,use_prefix_grouper}}", PACKED),
    gone(
        f"{ACTOR}.{{calculate_entropy,entropy_checkpointing,entropy_from_logits_chunk_size,entropy_from_logits_with_chunking}}",
        ENTROPY,
    ),
    gone(
        f"{ACTOR}.{{calculate_sum_pi_squared,sum_pi_squared_checkpointing}}",
        "of the estimator optimal_token_baseline, which is not here",
    ),
    gone(f"{ACTOR}.pad_to_length", PACKED),
    part(f"{ACTOR}.freeze_vision_tower", "actor.vision", "pictures", VISION),
    *quantisation(ACTOR),
    *router_replay(ACTOR),
]

REF = "actor_rollout_ref.ref"
REFERENCE = "the actor's: the reference is a snapshot of its first weights, swapped in"
REFERENCE_ROWS = [
    gone(f"{REF}.megatron.{{tensor,pipeline,virtual_pipeline,expert}}_model_parallel_size", REFERENCE),
    gone(f"{REF}.megatron.{{context_parallel_size,expert_tensor_parallel_size,seed,dtype}}", REFERENCE),
    gone(f"{REF}.megatron.{{override_transformer_config,override_ddp_config,override_mcore_model_config}}", REFERENCE),
    gone(
        f"{REF}.megatron.{{override_transformer_config,override_ddp_config,override_mcore_model_config}}.*", REFERENCE
    ),
    *engine(f"{REF}.megatron"),
    gone(
        f"{REF}.{{log_prob_max_token_len_per_gpu,log_prob_micro_batch_size,log_prob_micro_batch_size_per_gpu,"
        "log_prob_use_dynamic_bsz}",
        "the actor's microbatches",
    ),
    gone(f"{REF}.{{strategy,load_weight,rollout_n,use_torch_compile,ulysses_sequence_parallel_size}}", REFERENCE),
    gone(
        f"{REF}.{{entropy_checkpointing,entropy_from_logits_chunk_size,entropy_from_logits_with_chunking,pad_to_length}}",
        REFERENCE,
    ),
    KeyRow(f"{REF}.model", (), "another model as the reference is not here", absent=True),
    KeyRow(f"{REF}.model.*", (), "another model as the reference is not here", absent=True),
    gone(f"{REF}.fsdp_config.*", FSDP),
    *router_replay(REF),
    *profiler(REF),
]

CRITIC_ROWS = [
    to("critic.model.path", "critic.path", note="left out: the actor's", needed=True),
    gone("critic.model.tokenizer_path", "the policy's"),
    *model("critic.model", "critic"),
    absent("critic.model.override_config.*", "the critic has the policy's config.json"),
    gone("critic.model.fsdp_config.*", FSDP),
    *trained("critic", "critic"),
    to("critic.cliprange_value", "critic.cliprange_value"),
    gone("critic.enable", "algorithm.adv_estimator says whether there is a critic"),
    gone(
        "critic.{forward_max_token_len_per_gpu,forward_micro_batch_size,forward_micro_batch_size_per_gpu}",
        "as for the update",
    ),
    gone("critic.kl_ctrl.{type,kl_coef}", "verl never read it: algorithm.kl_ctrl"),
    gone("critic.checkpoint.async_save", "trainer.async_save, of all"),
    gone("critic.nccl_timeout", "trainer.timeout_s, of all"),
]
