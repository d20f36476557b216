"""The rows of a training engine: optimizer, parallel axes, Megatron's fields, profilers."""

from __future__ import annotations

from mcore_rl.from_verl.row import KeyRow, absent, gone, of_names, part, to

FILES = "the Hugging Face files are read in any layout"
ACTOR = "actor_rollout_ref.actor"
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
