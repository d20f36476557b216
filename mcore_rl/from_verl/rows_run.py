"""The rows of data, pictures, algorithm and trainer, and of verl's ``sft_trainer`` and ``fsdp_sft_trainer``."""

from __future__ import annotations

from mcore_rl.from_verl.row import KeyRow, absent, gone, listed, of_names, or_all, or_never, part, to
from mcore_rl.from_verl.rows_roles import FSDP, FSDP_CP, KL, NO_SUCH_KL, REMOTE, RESUME, megatron, model, optimizer

CORRECTION = "algorithm.rollout_correction"
OWN_DATASET = "files are parquet in the field's schema: a dataset class of one's own is not here"
PF_PPO = "not here: PF-PPO draws the batch again by its rewards"
DISTILLATION = (
    "a frozen teacher in Megatron processes of its own on the trainer's devices: `algorithm=distill`, or a coefficient "
    "beside another algorithm (docs/distillation.md)"
)
NSIGHT = "nsys profile takes them around mcore-rl; trainer.profile_steps traces with torch's profiler"
RESUME_MODE = of_names({"auto": "auto", "disable": "off", "resume_path": "path"}, "`auto`, `disable` or `resume_path`")
DEVICE = of_names({"cuda": None, "cpu": "cpu"}, "accelerators are NVIDIA's and AMD's: trainer.device")
TRUNCATION = of_names(
    {name: name for name in ("error", "left", "right", "middle")}, "`error`, `left`, `right` or `middle`"
)
METRIC = of_names(
    {"acc": "acc", "score": "score", "seq_reward": "score", "seq_final_reward": "score", "None": "acc"},
    "groups are compared by `acc` or `score`",
)
PICTURES = (
    "asked for by name (verl's default is `images`, of any model): from-verl writes it if the script does, or names a "
    "model of pictures"
)
STILLS = "pictures alone are read: rows with videos or sounds are refused"
SIZE = "pixels of a picture; without it from-verl writes those of the model's own processor, 12,845,056 of Qwen2.5-VL"
ONE_SIZING = "a picture is sized once, by the tower's own patches"


def sizes(verl: str) -> list[KeyRow]:
    """The rows of what a processor is told.  verl: the group of it."""
    return [
        to(f"{verl}.{{min_pixels,size.shortest_edge}}", "data.image_min_pixels"),
        to(f"{verl}.{{max_pixels,size.longest_edge}}", "data.image_max_pixels", note=SIZE),
        gone(verl, "an empty group"),
        absent(f"{verl}.*", "a picture has its fewest and most pixels, and no other setting"),
    ]


def pictures() -> list[KeyRow]:
    """The rows of a run's data."""
    return [
        part("data.image_key", "data.image_key", "pictures", PICTURES),
        part("data.{video_key,audio_key}", "data.image_key", "pictures", STILLS),
        *sizes("data.mm_processor_kwargs"),
        gone("data.image_patch_size", ONE_SIZING),
        gone("data.return_multi_modal_inputs", "pictures stay with their rows"),
    ]


DATA_ROWS = [
    to("data.train_files", "data.train_files", listed, "always a list", needed=True),
    to("data.val_files", "data.val_files", listed, "always a list", needed=True),
    to("data.train_batch_size", "data.train_batch_size", note="prompts of a step, also here"),
    part("data.gen_batch_size", "data.gen_batch_size", "filtered", "read with algorithm.filter_groups alone"),
    to("data.val_batch_size", "data.val_batch_size", note="no prompt is dropped"),
    to("data.max_prompt_length", "data.max_prompt_length"),
    to("data.max_response_length", "data.max_response_length"),
    to("data.prompt_key", "data.prompt_key"),
    to("data.filter_overlong_prompts", "data.filter_overlong_prompts"),
    to("data.truncation", "data.truncation", TRUNCATION),
    to("data.shuffle", "data.shuffle", note="another order of the same prompts", differs=True),
    to("data.seed", "data.seed", note="another order of the same prompts", keeps=True),
    to("data.train_max_samples", "data.train_max_samples", or_all, "-1 is null"),
    to("data.val_max_samples", "data.val_max_samples", or_all, "-1 is null"),
    to("data.apply_chat_template_kwargs", "data.chat_template_kwargs"),
    to("data.apply_chat_template_kwargs.*", "data.chat_template_kwargs"),
    to("data.tokenizer", "model.tokenizer_path"),
    gone("data.reward_fn_key", "the column is data_source"),
    *pictures(),
    gone("data.{return_raw_chat,return_raw_input_ids,return_full_prompt}", "rows stay with their samples"),
    gone(
        "data.{filter_overlong_prompts_workers,dataloader_num_workers,use_shm,validation_shuffle}",
        "prompts are read at the start",
    ),
    gone("data.trust_remote_code", REMOTE),
    absent("data.custom_cls.{path,name}", OWN_DATASET),
    absent("data.{sampler.class_path,sampler.class_name,datagen.path,datagen.name}", OWN_DATASET),
    gone("data.{tool_config_path,function_tool_path}", "the rollout's: actor_rollout_ref.rollout.multi_turn"),
    absent("data.continuous_token.enable", "what a model said is never encoded again: there is nothing to switch on"),
    gone("data.continuous_token.model_family", "read with continuous_token.enable alone"),
]

SPIN = "of verl's recipe/spin, which is algorithm=online_dpo with a reference that moves"
PAIR_LOSSES = {"sigmoid": "dpo", "ipo": "ipo", "hinge": "hinge"}

ALGORITHM_ROWS = [
    part(
        "algorithm.{adv_estimator,norm_adv_by_std_in_grpo}",
        "algorithm.adv_estimator",
        "estimator",
        "`gae`, `grpo`, `rloo`, `remax`, `gpg`, `opo`, `gdpo`, `reinforce_plus_plus`, `reinforce_plus_plus_baseline`; "
        "`grpo` with `norm_adv_by_std_in_grpo=False` is `dr_grpo`. `algorithm=NAME` sets all that belongs to one",
    ),
    to("algorithm.gamma", "algorithm.gamma"),
    to("algorithm.lam", "algorithm.lam"),
    to(
        "algorithm.use_kl_in_reward",
        "algorithm.use_kl_in_reward",
        note="before verl 0.3 it was always there without a KL loss",
    ),
    to("algorithm.kl_penalty", "algorithm.kl_penalty", of_names(KL, NO_SUCH_KL), "as actor.kl_loss_type"),
    to("algorithm.kl_ctrl.type", "algorithm.kl_ctrl.type"),
    to("algorithm.kl_ctrl.kl_coef", "algorithm.kl_ctrl.kl_coef"),
    to(
        "algorithm.kl_ctrl.target_kl",
        "algorithm.kl_ctrl.target_kl",
        note="nats a token, as in verl; algorithm.kl_ctrl.target_kl_per=response is the paper's",
    ),
    to(
        "algorithm.kl_ctrl.horizon",
        "algorithm.kl_ctrl.horizon",
        note="a batch larger than the horizon counts as the horizon",
        differs=True,
    ),
    to("algorithm.filter_groups.enable", "algorithm.filter_groups.enable"),
    to("algorithm.filter_groups.metric", "algorithm.filter_groups.metric", METRIC, "`acc` or `score`"),
    to(
        "algorithm.filter_groups.max_num_gen_batches",
        "algorithm.filter_groups.max_num_gen_batches",
        lambda most: most or None,
        "0, verl's no limit, is not here",
    ),
    gone("algorithm.filter_groups.max_inflight_gen_batches", "batches follow one another"),
    to("algorithm.dpo_beta", "actor.preference.beta", note=SPIN),
    to("algorithm.dpo_label_smoothing", "actor.preference.label_smoothing", note=SPIN),
    to(
        "algorithm.dpo_loss_type",
        "actor.preference.loss",
        of_names(PAIR_LOSSES, "there is no loss of pairs of that name"),
        f"`sigmoid` is `dpo`; {SPIN}",
    ),
    to("algorithm.gdpo_reward_keys", "algorithm.gdpo_reward_keys", listed),
    to(
        "algorithm.gdpo_reward_weights",
        "algorithm.gdpo_reward_weights",
        listed,
        "whitened over responses, as in the paper",
        differs=True,
    ),
    part(
        f"{CORRECTION}.{{rollout_is,rollout_is_threshold,rollout_is_batch_normalize}}",
        f"algorithm.off_policy {CORRECTION}.level {CORRECTION}.mode {CORRECTION}.upper {CORRECTION}.lower "
        f"{CORRECTION}.batch_normalize",
        "correction",
        '`off_policy=decoupled`; a threshold `"0.5_5.0"` (IcePop) is `mode=zero lower=0.5 upper=5.0`',
    ),
    part(
        f"{CORRECTION}.{{rollout_rs,rollout_rs_threshold,rollout_rs_threshold_lower}}",
        f"{CORRECTION}.reject {CORRECTION}.reject_lower {CORRECTION}.reject_upper",
        "correction",
        "one criterion; `token`, `sequence`, `geometric` (until 0.7.0) are `token_k1`, `seq_sum_k1`, `seq_mean_k1`. "
        "Bounds of `*_k1` are of p_trainer / p_sampler, verl's since 0.7.1 of its inverse: `0.8_2.0` is "
        "`reject_lower=0.5 reject_upper=1.25`",
    ),
    part(
        "algorithm.{rollout_is,rollout_is_level,rollout_is_mode,rollout_is_threshold,rollout_is_threshold_lower}",
        f"algorithm.off_policy {CORRECTION}.level {CORRECTION}.mode {CORRECTION}.upper {CORRECTION}.lower",
        "correction",
        "verl's in 0.6.0: `off_policy=decoupled`; `rollout_is_mode=mask` is `mode=zero`, since its divisor counts all "
        "tokens",
    ),
    absent("algorithm.rollout_is_veto_threshold", "reject=seq_max_k2 or seq_max_k3 rejects for one token"),
    absent(f"{CORRECTION}.rollout_token_veto_threshold", "reject=seq_max_k2 or seq_max_k3 rejects for one token"),
    part(
        f"{CORRECTION}.{{bypass_mode,loss_type,use_policy_gradient}}",
        "algorithm.off_policy actor.loss_mode",
        "correction",
        "`off_policy=bypass`; `rollout_rs` measures the policy before the step, not that of each update, and keeps the "
        "pass that bypass leaves out. `loss_type=reinforce` is `actor.loss_mode=policy_gradient`, without bypass",
        differs=True,
    ),
    absent("algorithm.use_pf_ppo", PF_PPO),
    gone("algorithm.pf_ppo.{reweight_method,weight_pow}", "read with use_pf_ppo alone"),
]

TRAINER_ROWS = [
    to("trainer.total_epochs", "trainer.total_epochs"),
    to("trainer.total_training_steps", "trainer.total_training_steps"),
    to("trainer.project_name", "trainer.project_name", keeps=True),
    to("trainer.experiment_name", "trainer.experiment_name", keeps=True),
    part("trainer.logger", "trainer.logger", "loggers", "metrics.jsonl is always written"),
    to("trainer.nnodes", "trainer.nnodes"),
    to("trainer.n_gpus_per_node", "trainer.n_gpus_per_node"),
    to("trainer.save_freq", "trainer.save_freq", or_never, "never is 0, verl's -1; the end is always saved"),
    to("trainer.test_freq", "trainer.test_freq", or_never, "never is 0, verl's -1"),
    to("trainer.val_before_train", "trainer.val_before_train"),
    to("trainer.val_only", "trainer.val_only"),
    to("trainer.resume_mode", "trainer.resume_mode", RESUME_MODE, "`disable` is `off`, `resume_path` is `path`"),
    to(
        "trainer.resume_from_path",
        "trainer.resume_from_path",
        lambda path: path or None,
        "a checkpoint of ours",
        differs=True,
    ),
    to("trainer.default_local_dir", "trainer.default_local_dir", note="everything of the run is there", keeps=True),
    to("trainer.max_actor_ckpt_to_keep", "trainer.max_to_keep", note="and the best is always kept"),
    gone("trainer.max_critic_ckpt_to_keep", "trainer.max_to_keep, of all"),
    to("trainer.critic_warmup", "trainer.critic_warmup"),
    to("trainer.ref_update_freq", "algorithm.ref_update_freq", or_never, f"steps; never is 0, verl's -1; {SPIN}"),
    to("trainer.log_val_generations", "trainer.log_val_generations", keeps=True),
    to("trainer.device", "trainer.device", DEVICE, "by itself the accelerator"),
    part(
        "trainer.{rollout_data_dir,validation_data_dir}",
        "trainer.save_rollouts",
        "samples",
        "always, in the run directory",
    ),
    part(
        "{trainer.profile_steps,global_profiler.steps}",
        "trainer.profile_steps",
        "profiled",
        "torch's profiler, of the trainer",
    ),
    gone("trainer.balance_batch", "always, by tokens"),
    gone(
        "trainer.{default_hdfs_dir,del_local_ckpt_after_load,ray_wait_register_center_timeout}",
        "checkpoints are in the run directory",
    ),
    gone("trainer.esi_redundant_time", "SIGTERM saves a checkpoint: docs/resilience.md"),
    gone("trainer.{use_legacy_worker_impl,use_v1}", "verl's own"),
    part(
        "trainer.v1.{trainer_mode,sampler.max_off_policy_threshold}",
        "trainer.mode trainer.placement async.max_staleness",
        "asynchrony",
        "`separate_async` is `trainer.mode=async`; `colocate_async` is not here, since both work at once",
    ),
    gone(
        "trainer.v1.{sync,sampler.custom_sampler.name,sampler.custom_sampler.path,sampler.max_off_policy_strategy,"
        "sampler.sampler_kwargs,sampler.sync_refill_failed_groups,"
        "colocate_async.num_warmup_batches,separate_async.num_warmup_batches,separate_async.parameter_sync_step}",
        "what is too old is never drawn, and a step is data.train_batch_size",
    ),
    to("actor_rollout_ref.nccl_timeout", "trainer.timeout_s", note="seconds, of a collective"),
    gone("actor_rollout_ref.hybrid_engine", "trainer.placement=separate gives engines devices of their own"),
    part(
        "async_training.{staleness_threshold,trigger_parameter_sync_step,require_batches,partial_rollout}",
        "trainer.mode trainer.placement async.max_staleness async.partial_rollout data.train_batch_size",
        "asynchrony",
        "a step is what verl trains between two updates of the engines' weights: trigger_parameter_sync_step times "
        "require_batches minibatches. `async.max_staleness` counts versions of the weights, and is the threshold "
        "rounded up",
    ),
    part("rollout.{nnodes,n_gpus_per_node}", "trainer.placement rollout.dp", "asynchrony", "the engines' own devices"),
    part(
        "rollout.total_rollout_steps",
        "trainer.total_training_steps",
        "asynchrony",
        "prompts; divided by a step's",
    ),
    gone("rollout.n", "actor_rollout_ref.rollout.n is there once"),
    absent("async_training.use_dynamic_resource_scheduling", "engines and trainer keep their devices"),
    gone(
        "async_training.{dynamic_schedule_policy,dynamic_schedule_deactivate_ratio,dynamic_schedule_enable_rebalance,"
        "concurrent_samples_per_replica}",
        "read with use_dynamic_resource_scheduling alone",
    ),
    gone("async_training.{use_trainer_do_validate,compute_prox_log_prob,use_rollout_log_probs}", "engines validate"),
    to("{ray_init,ray_kwargs.ray_init}.num_cpus", "ray_init.num_cpus"),
    to("{ray_init,ray_kwargs}.timeline_json_file", "ray_init.timeline_json_file"),
    gone("{ray_init,ray_kwargs.ray_init}.{runtime_env,address,namespace,_temp_dir}", "Ray starts by itself"),
    gone("{ray_init,ray_kwargs.ray_init}.runtime_env.*", "workers have the environment of the run"),
    gone("{model_engine,hydra}.*", "verl's own"),
    gone("model_engine", "Megatron"),
    gone("trainer.v1.separate_async.hybrid_rollout.*", "engines and trainer keep their devices"),
    gone("global_profiler.{finish_hook_all_ranks,finish_hook_cmd,finish_hook_ranks,relocate_results}", NSIGHT),
    gone("trainer.{controller_nsight_options,worker_nsight_options}.*", NSIGHT),
    gone("global_profiler.global_tool_config.nsys.*", NSIGHT),
    gone("global_profiler.{tool,save_path,profile_continuous_steps}", NSIGHT),
    gone("global_profiler.global_tool_config.{torch_memory,precision_debugger}.*", NSIGHT),
    gone("trainer.npu_profile.*", "accelerators are NVIDIA's and AMD's"),
    gone("actor_rollout_ref.profiler.*", NSIGHT),
    part(
        "distillation.{enabled,teacher_models.teacher_model.model_path}",
        "teacher.path algorithm.distill.coef algorithm.adv_estimator",
        "distillation",
        DISTILLATION,
    ),
    part(
        "distillation.distillation_loss.{loss_mode,use_policy_gradient,use_task_rewards,distillation_loss_coef}",
        "algorithm.distill.coef algorithm.adv_estimator",
        "distillation",
        "`k1` with use_policy_gradient=True: part of the advantages of the one policy loss; without task rewards "
        "algorithm.adv_estimator=none",
    ),
    absent("distillation.distillation_loss.{loss_max_clamp,log_prob_min_clamp}", "nothing is clamped"),
    absent("distillation.distillation_loss.policy_loss_mode", "there is one policy loss, actor.loss_mode"),
    gone("distillation.distillation_loss.{clip_ratio,clip_ratio_low,clip_ratio_high}", "the actor's clip range holds"),
    gone("distillation.distillation_loss.topk", "read by losses over the largest log-probs alone"),
    part("distillation.teacher_key", "teacher.by_source", "distillation", "`data_source`, and no other column"),
    part(
        "distillation.teacher_models.*.{key,model_path}",
        "teacher.path teacher.by_source",
        "distillation",
        "several teachers: of each its key, a data source, and its model; one alone teaches every row",
    ),
    gone("distillation.teacher_models.*.inference.*", "Megatron scores: teacher.parallel.*"),
    gone("distillation.teacher_models.*.num_replicas", "one set of weights scores at a time"),
    absent("distillation.teacher_models.*", "a teacher has a key and a model_path"),
    gone("distillation.{n_gpus_per_node,nnodes}", "the teacher is on the trainer's devices, in turn with the others"),
    absent("skip.{rollout,async_rollout,rollout_tq}.enable", "responses are always drawn anew"),
    gone("skip.{rollout,async_rollout,rollout_tq}.{action,dump_dir,steps}", "read with skip.*.enable alone"),
    gone("transfer_queue.*", "samples go through Ray's object store"),
]

CUT = of_names({name: name for name in ("error", "left", "right")}, "`error`, `left` or `right`")
BATCHES = "one budget of tokens, which packed rows fill: the numbers of a run do not depend on it"
COLUMNS = "a row is `data.messages_key`, or `data.prompt_key` and `data.response_key`"

SFT_ROWS = [
    to("data.train_files", "data.train_files", listed, "always a list"),
    to("data.val_files", "data.val_files", listed, "always a list"),
    to("data.train_batch_size", "data.train_batch_size", note="rows of an optimizer step, also here"),
    part(
        "data.{use_dynamic_bsz,max_token_len_per_gpu,micro_batch_size_per_gpu}",
        "actor.microbatch_tokens",
        "fine_tuning_batches",
        BATCHES,
    ),
    gone("data.micro_batch_size", BATCHES),
    part("data.{messages_key,multiturn.enable,multiturn.messages_key}", "data.messages_key", "conversation", COLUMNS),
    part("data.{prompt_key,prompt_dict_keys}", "data.prompt_key", "conversation", COLUMNS),
    part("data.{response_key,response_dict_keys}", "data.response_key", "conversation", COLUMNS),
    gone("data.{tools_key,multiturn.tools_key}", "the column `tools` of a row is given to its chat template"),
    gone(
        "data.{enable_thinking_key,enable_thinking_default,multiturn.enable_thinking_key}",
        "data.chat_template_kwargs, for all rows",
    ),
    to("data.max_length", "data.max_length"),
    to("data.truncation", "data.truncation", CUT),
    to("data.train_max_samples", "data.train_max_samples", or_all, "-1 is null"),
    to("data.val_max_samples", "data.val_max_samples", or_all, "-1 is null"),
    to("data.apply_chat_template_kwargs", "data.chat_template_kwargs"),
    to("data.apply_chat_template_kwargs.*", "data.chat_template_kwargs"),
    gone("data.{pad_mode,balance_dp_token,use_shm,num_workers,ignore_input_ids_mismatch}", "rows are packed"),
    absent("data.chat_template", "the tokenizer's folder has the template: change it in your copy"),
    *pictures(),
    absent("data.custom_cls.{path,name}", OWN_DATASET),
    to("model.{path,partial_pretrain}", "model.path", needed=True),
    to("model.tokenizer_path", "model.tokenizer_path"),
    to("model.override_config.*", "model.config_overrides", note="fields of config.json"),
    *model("model", "actor"),
    gone("model.{strategy,fsdp_config}", FSDP),
    gone("model.fsdp_config.*", FSDP),
    *optimizer("optim", "actor.optim"),
    part("optim.{warmup_steps_ratio}", "actor.optim.warmup_ratio", "warmup", "a share of the run stays one"),
    part("optim.lr_scheduler", "actor.optim.lr_schedule", "decay", "`wsd` is not here"),
    gone("{optim,model}", "groups that are chosen by name: Megatron's AdamW, a Hugging Face model"),
    gone("{engine,model_engine}", "Megatron"),
    *megatron("engine", "actor"),
    to("{engine.ulysses_sequence_parallel_size,ulysses_sequence_parallel_size}", "actor.parallel.cp", note=FSDP_CP),
    gone("engine.*", FSDP),
    gone("use_remove_padding", "rows are packed"),
    gone("{checkpoint,trainer.checkpoint}.*", RESUME),
    gone("{profiler,global_profiler}.*", "trainer.profile_steps traces steps with torch's profiler"),
    to("trainer.total_epochs", "trainer.total_epochs"),
    to("trainer.total_training_steps", "trainer.total_training_steps"),
    to("trainer.project_name", "trainer.project_name", keeps=True),
    to("trainer.experiment_name", "trainer.experiment_name", keeps=True),
    part("trainer.logger", "trainer.logger", "loggers", "metrics.jsonl is always written"),
    to("trainer.nnodes", "trainer.nnodes", note="of torchrun, too"),
    to("trainer.n_gpus_per_node", "trainer.n_gpus_per_node", note="of torchrun, too"),
    to("trainer.save_freq", "trainer.save_freq", or_never, "never is 0, verl's -1; the end is always saved"),
    to("trainer.test_freq", "trainer.test_freq", or_never, "never is 0, verl's -1"),
    to("trainer.resume_mode", "trainer.resume_mode", RESUME_MODE, "`disable` is `off`, `resume_path` is `path`"),
    to("trainer.resume_from_path", "trainer.resume_from_path", lambda path: path or None, "a checkpoint of ours"),
    to("trainer.default_local_dir", "trainer.default_local_dir", note="everything of the run is there", keeps=True),
    to("trainer.max_ckpt_to_keep", "trainer.max_to_keep", note="and the best is always kept"),
    to("trainer.seed", "data.seed", note="another order of the same rows", keeps=True),
    to("trainer.device", "trainer.device", DEVICE, "by itself the accelerator"),
    gone(
        "trainer.{default_hdfs_dir,resume_path,balance_batch,profile_interval}", "checkpoints are in the run directory"
    ),
]
