"""For every numeric key of every command: values that must be refused, and values that must be accepted.

Written by hand from what the keys mean, and not from the bounds beside the fields: a bound that is missing or wrong
there shows here.  Beside these, every number refuses what ``never`` gives.  Values are as on a command line.
"""

from __future__ import annotations

from collections.abc import Iterator

NEVER_FLOAT = ("nan", "inf", "-inf", "1e300", "-1e300", "''", "x", "[1]", "{a:1}")
NEVER_INT = ("nan", "inf", "1.5", "true", "1" + "0" * 26, "-1" + "0" * 26, "''", "x", "[1]", "{a:1}")

COUNT = (("0", "-1"), ("1", "7"))  # of at least one
COUNT_OR_NONE = (("-1",), ("0", "1", "7"))
SEED = (("-1", "1" + "0" * 20), ("0", "1", "4294967295"))
SECONDS = (("0", "-1", "1e12", "1e-9"), ("0.5", "600", "86400"))
SECONDS_OR_0 = (("-1", "1e12"), ("0", "0.5", "600"))
SHARE = (("-0.1", "1.1"), ("0", "0.5", "1"))
PART = (("-0.1", "0", "1.1"), ("0.5", "1"))  # not nothing
COEFFICIENT = (("-1", "-1e-9"), ("0", "0.001", "1"))
POSITIVE = (("0", "-1"), ("0.001", "1", "20"))
ANY = ((), ("-1", "0", "0.5", "2"))
PORT = (("-1", "65536"), ("0", "8000", "65535"))
RANKS = (("0", "-1", "99999999999"), ("1", "8"))
TEMPERATURE = (("-0.1", "-1", "0.001"), ("0", "0.6", "1", "2"))
TOP_K = (("0", "-2"), ("-1", "1", "50"))

ROLE = {
    "max_nonfinite_steps": COUNT,
    "microbatch_patches": COUNT,
    "microbatch_sequences": COUNT,
    "microbatch_tokens": COUNT,
    "moe.aux_loss_coeff": COEFFICIENT,
    "moe.z_loss_coeff": COEFFICIENT,
    "optim.betas": (
        ("[0.9]", "[0.9,1]", "[-0.1,0.9]", "[0.9,0.9,0.9]", "[nan,0.9]", "[0.9,inf]", "[]", "0.9"),
        ("[0.9,0.95]",),
    ),
    "optim.clip_grad": COEFFICIENT,
    "optim.eps": (("0", "-1e-8"), ("1e-8", "1e-5")),
    "optim.lr": (("-1", "-1e-9", "1e6"), ("0", "1e-6", "1e-3", "0.1")),
    "optim.lr_warmup_steps": COUNT_OR_NONE,
    "optim.min_lr_ratio": SHARE,
    "optim.total_steps": COUNT_OR_NONE,
    "optim.warmup_ratio": (("-0.1", "1", "1.1"), ("0", "0.1", "0.99")),
    "optim.weight_decay": (("-1", "-1e-9", "1e6"), ("0", "0.01", "0.1", "1")),
    "parallel.cp": RANKS,
    "parallel.ep": RANKS,
    "parallel.etp": RANKS,
    "parallel.pipeline_layers": (("[0]", "[-1,5]", "[1.5]", "[99999999999]"), ("[1,3]", "[16,15,15,15]")),
    "parallel.pp": RANKS,
    "parallel.tp": RANKS,
    "parallel.vpp": RANKS,
    "seed": SEED,
}  # fmt: skip
ADAPTED = {"lora.rank": COUNT_OR_NONE, "lora.alpha": POSITIVE, "lora.dropout": (("-0.1", "0.05", "1"), ("0",))}
TRAINED = ADAPTED | {"loss_agg_constant": POSITIVE, "ppo_epochs": COUNT, "ppo_mini_batch_size": COUNT}
PREFERENCE = {
    "beta": POSITIVE,
    "desirable_weight": POSITIVE,
    "gamma": COEFFICIENT,
    "label_smoothing": (("-0.1", "0.5", "1"), ("0", "0.1", "0.49")),
    "sft_coef": COEFFICIENT,
    "undesirable_weight": POSITIVE,
}
SERVING = {
    "dp": RANKS,
    "ep": RANKS,
    "gpu_memory_utilization": PART,
    "kv_cache_memory_bytes": (("0", "-1", "1" + "0" * 18), ("16777216", "80000000000")),
    "max_num_batched_tokens": COUNT,
    "max_num_seqs": COUNT,
    "tp": RANKS,
}
NUMBERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "actor.clip_cov_lb": ANY,
    "actor.clip_cov_ratio": PART,
    "actor.clip_cov_ub": ANY,
    "actor.clip_ratio": COEFFICIENT,
    "actor.clip_ratio_c": (("-1", "0", "1"), ("1.5", "3")),
    "actor.clip_ratio_high": COEFFICIENT,
    "actor.clip_ratio_low": COEFFICIENT,
    "actor.entropy_coeff": COEFFICIENT,
    "actor.full_kl_gib": COEFFICIENT,
    "actor.kl_cov_ratio": PART,
    "actor.kl_loss_coef": COEFFICIENT,
    "actor.ppo_kl_coef": COEFFICIENT,
    "actor.tau_neg": POSITIVE,
    "actor.tau_pos": POSITIVE,
    "algorithm.distill.coef": COEFFICIENT,
    "algorithm.distill.jsd_beta": (("0", "1", "-0.5", "2"), ("0.1", "0.5", "0.9")),
    "algorithm.filter_groups.lower": ANY,
    "algorithm.filter_groups.max_num_gen_batches": COUNT,
    "algorithm.filter_groups.upper": ANY,
    "algorithm.gamma": SHARE,
    "algorithm.gdpo_reward_weights": (("[nan]", "[inf]"), ("[1,0.5]", "1")),
    "algorithm.kl_ctrl.horizon": COUNT,
    "algorithm.kl_ctrl.kl_coef": COEFFICIENT,
    "algorithm.kl_ctrl.target_kl": COEFFICIENT,
    "algorithm.lam": SHARE,
    "algorithm.outcome_coef": COEFFICIENT,
    "algorithm.pass_k": (("-1", "0", "1"), ("2", "5")),
    "algorithm.process_coef": COEFFICIENT,
    "algorithm.ref_update_freq": (("-1", "0.5"), ("0", "1", "500")),
    "algorithm.sppo_eta": (("-1", "0"), ("0.5", "1000")),
    "algorithm.rollout_correction.lower": (("-0.1", "1.5"), ("0", "0.5", "1")),
    "algorithm.rollout_correction.reject_lower": (("0", "-1"), ("0.5", "1")),
    "algorithm.rollout_correction.reject_upper": (("0", "-1"), ("0.01", "1.001", "2")),
    "algorithm.rollout_correction.upper": (("-1", "0.9"), ("1", "2")),
    "critic.cliprange_value": COEFFICIENT,
    "custom_reward_function.import_timeout_s": SECONDS,
    "custom_reward_function.weights": (("[nan]", "[inf]"), ("[1,0.5]", "0", "[-1]")),
    "data.gen_batch_size": COUNT,
    "data.image_max_pixels": COUNT,
    "data.image_min_pixels": COUNT,
    "data.max_images": COUNT,
    "data.max_length": COUNT,
    "data.max_prompt_length": COUNT,
    "data.max_response_length": COUNT,
    "data.max_samples": COUNT,
    "data.mean_image_tokens": COUNT,
    "data.mean_response_length": COUNT,
    "data.seed": SEED,
    "data.train_batch_size": COUNT,
    "data.train_max_samples": COUNT,
    "data.val_batch_size": COUNT,
    "data.val_max_samples": COUNT,
    "k": (("[0]", "[-1]", "[1.5]", "[2,2]", "[99999999999]"), ("[1]", "[1,8]", "[]", "3")),
    "max_response_length": COUNT,
    "process_reward.beta": POSITIVE,
    "ray_init.num_cpus": COUNT,
    "recipe.published.score": (("-1", "101"), ("0", "43.5", "100")),
    "reward.code.first_cases": COUNT,
    "reward.code.memory_mib": (("0", "-1", "1", "31"), ("32", "512")),
    "reward.code.output_kib": COUNT,
    "reward.code.timeout_s": SECONDS,
    "reward.error_score": ANY,
    "reward.gsm8k.format_score": ANY,
    "reward.gsm8k.score": ANY,
    "reward.judge.concurrency": (("0", "-1", "99999999"), ("1", "32")),
    "reward.judge.max_cost": POSITIVE,
    "reward.judge.max_tokens": COUNT,
    "reward.judge.price_per_million": (("[-1,1]", "[nan,1]", "[1,inf]"), ("[0,0]", "[0.15,0.6]")),
    "reward.judge.seed": SEED,
    "reward.judge.engines.max_length": COUNT,
    "reward.judge.retries": COUNT_OR_NONE,
    "reward.judge.scale": (("[nan,1]", "[0,inf]"), ("[0,10]", "[-1,1]")),
    "reward.judge.temperature": (("-0.1", "-1", "2.1"), ("0", "0.6", "2")),
    "reward.judge.timeout_s": SECONDS,
    "reward.num_workers": (("0", "-1", "99999999"), ("1", "16")),
    "reward.overlong.length": COUNT,
    "reward.overlong.penalty_factor": COEFFICIENT,
    "reward.timeout_s": SECONDS,
    "reward.xml.correctness": ANY,
    "reward.xml.integer": ANY,
    "reward.xml.soft_format": ANY,
    "reward.xml.strict_format": ANY,
    "reward.xml.tag_count": ANY,
    "reward_model.max_length": COUNT,
    "rollout.agent.max_calls_per_turn": COUNT,
    "rollout.agent.max_parallel_calls": COUNT,
    "rollout.agent.max_tool_response_length": COUNT,
    "rollout.agent.max_tool_s": SECONDS,
    "rollout.agent.max_turn_tokens": COUNT,
    "rollout.agent.max_turns": COUNT,
    "rollout.agent.program.max_parallel": COUNT,
    "rollout.agent.program.port": PORT,
    "rollout.agent.program.timeout_s": SECONDS,
    "rollout.agent.search_results": COUNT,
    "rollout.agent.tool_reward_coef": COEFFICIENT,
    "rollout.agent.tool_timeout_s": SECONDS,
    "rollout.max_prompt_length": COUNT,
    "rollout.max_response_length": COUNT,
    "rollout.n": (("0", "-1", "100000"), ("1", "7", "4096")),
    "rollout.over_sampling": POSITIVE,
    "rollout.seed": SEED,
    "rollout.stop_token_ids": (("[-1]", "[1.5]", "[99999999999]"), ("[0,2]", "[]", "3")),
    "rollout.temperature": TEMPERATURE,
    "rollout.top_k": TOP_K,
    "rollout.top_p": PART,
    "rollout.val_kwargs.n": COUNT,
    "rollout.val_kwargs.temperature": TEMPERATURE,
    "rollout.val_kwargs.top_k": TOP_K,
    "rollout.val_kwargs.top_p": PART,
    "async.max_staleness": COUNT_OR_NONE,
    "trainer.critic_warmup": COUNT_OR_NONE,
    "trainer.device_peak_tflops": POSITIVE,
    "trainer.guards.check_weights_freq": COUNT_OR_NONE,
    "trainer.guards.entropy_share": SHARE,
    "trainer.guards.max_clip_share": SHARE,
    "trainer.guards.max_kl": COEFFICIENT,
    "trainer.guards.max_masked_share": SHARE,
    "trainer.guards.max_update_kl": COEFFICIENT,
    "trainer.guards.min_effective_sample_size": SHARE,
    "trainer.guards.max_logprob_diff": COEFFICIENT,
    "trainer.guards.reward_drop": (("-0.1", "5"), ("0", "0.5", "1.5")),
    "trainer.guards.window": (("-1", "1"), ("0", "2", "10")),
    "trainer.keep_every": COUNT,
    "trainer.log_val_generations": COUNT_OR_NONE,
    "trainer.max_restarts": COUNT_OR_NONE,
    "trainer.max_to_keep": COUNT,
    "trainer.n_gpus_per_node": RANKS,
    "trainer.nnodes": RANKS,
    "trainer.profile_steps": (("[0]", "[-1]", "[1.5]"), ("[2]", "[1,3]", "[]", "2")),
    "trainer.prometheus.port": (("0", "-1", "65536"), ("1", "9400", "65535")),
    "trainer.save_freq": COUNT_OR_NONE,
    "trainer.test_freq": COUNT_OR_NONE,
    "trainer.timeout_s": SECONDS,
    "trainer.total_epochs": COUNT,
    "trainer.total_training_steps": COUNT,
    "trainer.watchdog.factor": (("0", "-1", "0.5"), ("1", "20")),
    "trainer.watchdog.least_s": SECONDS_OR_0,
    "trainer.watchdog.limit_s": SECONDS_OR_0,
    **{
        f"{role}.{key}": values
        for role in ("actor", "critic", "process_reward")
        for key, values in (ROLE | TRAINED).items()
    },
    **{f"teacher.{key}": values for key, values in ROLE.items()},
    **{f"actor.preference.{key}": values for key, values in PREFERENCE.items()},
    "actor.reward.centering_coef": COEFFICIENT,
    **{
        f"{group}.{key}": values
        for group in ("rollout", "reward_model", "reward.judge.engines")
        for key, values in SERVING.items()
    },
}
CLUSTER = {
    "cpus_per_node": COUNT,
    "disk_gb_s": POSITIVE,
    "gpu_memory_gib": COEFFICIENT,
    "gpus_per_node": (("-1", "99999999"), ("0", "8")),
    "host_memory_gib": POSITIVE,
    "inter_node_gb_s": POSITIVE,
    "intra_node_gb_s": POSITIVE,
    "memory_gb_s": POSITIVE,
    "reached.host_link_gb_s": POSITIVE,
    "reached.inter_node_gb_s": POSITIVE,
    "reached.intra_node_gb_s": POSITIVE,
    "residuals.device_collectives_mib": POSITIVE,
    "residuals.device_context_mib": POSITIVE,
    "residuals.host_engine_mib": POSITIVE,
    "residuals.host_trainer_mib": POSITIVE,
    "residuals.pinned_ratio": POSITIVE,
    "slurm.grace_s": COUNT,
    "slurm.join_timeout_s": COUNT,
    "slurm.max_requeues": COUNT,
    "slurm.port": (("0", "-1", "65535", "99999"), ("1024", "6379")),
}


def never(accepted: tuple[str, ...], *, is_float: bool) -> Iterator[str]:
    """What a number refuses whatever it means.  accepted: of its row, which says whether it is a list."""
    listed = any(each.startswith("[") for each in accepted)
    for text in NEVER_FLOAT if is_float else NEVER_INT:
        if not (listed and text in ("''", "[1]")):
            yield f"[{text}]" if listed and text not in ("x", "{a:1}") else text
