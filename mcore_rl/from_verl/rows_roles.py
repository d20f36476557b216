"""The rows of models that verl trains or scores with: model, actor, reference, critic."""

from __future__ import annotations

from mcore_rl.from_verl.row import KeyRow, absent, gone, of_names, part, to
from mcore_rl.from_verl.rows_engine import (
    ENTROPY,
    FILES,
    FSDP,
    FSDP_CP,
    PACKED,
    engine,
    megatron,
    optimizer,
    profiler,
    quantisation,
    router_replay,
)

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


ACTOR = "actor_rollout_ref.actor"
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

REF, REFERENCE = "actor_rollout_ref.ref", "the actor's: the reference is a snapshot of its first weights, swapped in"
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
