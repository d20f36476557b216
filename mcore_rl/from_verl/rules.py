"""Rules that decide keys of ours from several keys of verl's; ``RULES`` has them by the name that rows give.

A rule is run once, or once for each trained role (``ROLES``).  It asks ``verl[key]``, which is what was written or
verl's default, and tells an ``Answer`` what follows.
"""

from __future__ import annotations

from collections.abc import Callable

from mcore_rl.config.algorithm import Rejection
from mcore_rl.config.algorithm_registry import policy_loss
from mcore_rl.config.roles import LossAggregation
from mcore_rl.config.trainer import Logger
from mcore_rl.config.vllm_fields import VLLM_FIELDS
from mcore_rl.from_verl.answer import Answer, Difference, Entry
from mcore_rl.from_verl.facts import versions
from mcore_rl.from_verl.row import within
from mcore_rl.from_verl.rows_roles import ACTOR, CLIP, LOSSES
from mcore_rl.from_verl.rules_adapters import lora
from mcore_rl.from_verl.rules_megatron import (
    balance,
    chunks,
    dispatcher,
    experts,
    pipeline,
    recompute,
    transformer_field,
)
from mcore_rl.from_verl.rules_modes import BATCHES, agents, asynchrony, conversation, distillation, fine_tuning_batches
from mcore_rl.from_verl.rules_pictures import pictures
from mcore_rl.from_verl.table import row_for
from mcore_rl.from_verl.written import ASYNC, Verl

LENGTHS = ("data.max_prompt_length", "data.max_response_length")
SAME_ESTIMATORS = "gae grpo rloo remax gpg opo gdpo reinforce_plus_plus reinforce_plus_plus_baseline"
ESTIMATORS = {name: name for name in SAME_ESTIMATORS.split()}
ESTIMATORS |= {"rloo_vectorized": "rloo", "grpo_vectorized": "grpo"}
DECAYS = {"constant": "constant", "linear": "linear", "cosine": "cosine", "None": "constant"}
CORRECTION = "algorithm.rollout_correction"  # verl's group, and ours
REJECTIONS = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"} | {
    each.value: each.value for each in Rejection
}


AWAKE = 0.9  # of a device, for engines that are awake at once


def microbatches(verl: Verl, answer: Answer, role: str) -> None:
    """One budget of tokens: that of verl's dynamic batches, or of its micro batches of the longest sequences."""
    base = verl.places[role].role
    dynamic, budget, micro, total = within(
        base, "use_dynamic_bsz ppo_max_token_len_per_gpu ppo_micro_batch_size_per_gpu ppo_micro_batch_size"
    )
    spread = within(base, "megatron.context_parallel_size ulysses_sequence_parallel_size")
    if verl[dynamic] and verl[budget]:
        cp = next((size for each in spread if (size := verl[each])), 1)
        tokens = int(verl[budget]) * int(cp)
        answer.set(f"{role}.microbatch_tokens", tokens, dynamic, budget, *spread)
        if cp != 1:
            text = f"tokens of a context-parallel group: of a GPU, times context_parallel_size={cp}"
            answer.changed(budget, text, f"{role}.microbatch_tokens={tokens}")
        answer.dropped(micro, "not read in verl either, with use_dynamic_bsz=True")
    elif verl[micro]:
        longest = sum(int(verl[each]) for each in LENGTHS)
        tokens = int(verl[micro]) * longest
        answer.set(f"{role}.microbatch_tokens", tokens, micro, *LENGTHS)
        text = (
            f"sequences are packed into a budget of tokens: that of {verl[micro]} of the longest, {longest} tokens each"
        )
        answer.changed(micro, text, f"{role}.microbatch_tokens={tokens}")
        answer.dropped(budget, "not read in verl either, without use_dynamic_bsz=True")
    answer.absent(total, "of all devices together: write ppo_micro_batch_size_per_gpu")


def aggregation(verl: Verl, answer: Answer, role: str) -> None:
    """How losses of tokens become one."""
    base = verl.places[role].role
    mode, factor = within(base, "loss_agg_mode loss_scale_factor")
    ours = {each.value.replace("_", "-"): each.value for each in LossAggregation}
    ours |= {"seq-mean-token-sum-norm": LossAggregation.sum_over_constant.value}
    loss = answer.settings.get("actor.loss_mode")
    fixed = policy_loss(loss.value).aggregation if loss and role == "actor" else None
    if loss and fixed is not None:
        answer.set(f"{role}.loss_agg_mode", fixed.value, mode, *loss.sources)
        answer.changed(mode, f"with {loss.value}, whatever is written", f"{role}.loss_agg_mode")
    elif str(verl[mode]) in ours:
        answer.set(f"{role}.loss_agg_mode", ours[str(verl[mode])], mode)
        if versions().index(verl.version) < versions().index("0.7.0"):
            text = "over the whole minibatch; verl's, before 0.7, over each micro batch, and the mean of these"
            answer.changed(mode, text, f"{role}.loss_agg_mode={ours[str(verl[mode])]}")
    elif verl[mode] is not None:
        answer.absent(mode, f"there are {', '.join(ours)}")
    if verl[factor] is not None:
        answer.set(f"{role}.loss_agg_constant", verl[factor], factor)


def updates_of_a_step(verl: Verl, role: str) -> int:
    """Optimizer steps in a step of the run."""
    if verl.program != "train":
        return 1
    base = verl.places[role].role
    if verl.mode == ASYNC:
        return int(verl[BATCHES]) * int(verl[f"{base}.ppo_epochs"] or 1)
    keys = ("data.train_batch_size", *within(base, "ppo_mini_batch_size ppo_epochs"))
    batch, mini, epochs = (int(verl[key] or 1) for key in keys)
    return max(1, batch // mini) * epochs


def optimizer_steps(verl: Verl, answer: Answer, role: str, key: str, ours: str) -> None:
    """A number of steps, which verl counts in steps of the run."""
    updates = updates_of_a_step(verl, role)
    steps = int(verl[key]) * updates
    answer.set(ours, steps, key)
    if updates > 1:
        text = f"optimizer steps: verl counts steps of the run, of {updates} optimizer steps each"
        answer.changed(key, text, f"{ours}={steps}")


def warmup(verl: Verl, answer: Answer, role: str) -> None:
    """verl's scheduler counts steps of the run; ours, optimizer steps."""
    steps, *ratios = within(verl.places[role].optim, "lr_warmup_steps lr_warmup_steps_ratio warmup_steps_ratio")
    if int(verl[steps] or 0) > 0:
        optimizer_steps(verl, answer, role, steps, f"{role}.optim.lr_warmup_steps")
    else:
        for ratio in ratios:
            if verl[ratio]:
                answer.set(f"{role}.optim.warmup_ratio", verl[ratio], ratio)


def decay(verl: Verl, answer: Answer, role: str) -> None:
    """The schedule, where it ends, and at which share of the rate."""
    base = verl.places[role].optim
    styles = within(base, "lr_decay_style warmup_style lr_scheduler_type lr_scheduler")
    told = [each for each in styles if verl[each] is not None]
    style = next((each for each in told if verl.has(each)), told[0] if told else styles[0])
    ours = DECAYS.get(str(verl[style]))
    if ours is None:
        answer.absent(style, f"there are {', '.join(list(DECAYS)[:3])}; the rate is held after warm-up")
        return
    answer.set(f"{role}.optim.lr_schedule", ours, style)
    *ends, least, share = keys = within(base, "lr_decay_steps total_training_steps min_lr min_lr_ratio")
    if ours == "constant":
        for key in keys:
            answer.dropped(key, "read by a rate that decays alone")
        return
    if end := next((each for each in ends if int(verl[each] or 0) > 0), None):
        optimizer_steps(verl, answer, role, end, f"{role}.optim.total_steps")
    if verl[share]:
        answer.set(f"{role}.optim.min_lr_ratio", verl[share], share)
    elif verl[least]:
        answer.set(f"{role}.optim.min_lr_ratio", float(verl[least]) / float(verl[f"{base}.lr"]), least)


def betas(verl: Verl, answer: Answer, role: str) -> None:
    """Adam's, from the fields of Megatron's optimizer."""
    base = verl.places[role].optim
    keys = within(f"{base}.override_optimizer_config", "adam_beta1 adam_beta2")
    if verl.has(*keys):
        first, second = verl[f"{base}.betas"] or (0.9, 0.999)
        answer.set(f"{role}.optim.betas", [verl[keys[0]] or first, verl[keys[1]] or second], *keys)


def clip(verl: Verl, answer: Answer) -> None:
    """The clip range; verl's two ranges go before the one."""
    one, low, high = within(ACTOR, "clip_ratio clip_ratio_low clip_ratio_high")
    below, above = (verl[one] if verl[each] is None else verl[each] for each in (low, high))
    if below is not None and below == above:
        answer.set(
            "actor.clip_ratio",
            below,
            *(each for each in (low, high) if verl[each] is not None),
            *([one] if verl[low] is None else []),
        )
    else:
        answer.set("actor.clip_ratio_low", below, low)
        answer.set("actor.clip_ratio_high", above, high)
    if verl[low] is not None and verl[high] is not None and verl[one] not in (below, None):
        answer.dropped(one, CLIP)


def loss(verl: Verl, answer: Answer) -> None:
    """The policy loss."""
    key = f"{ACTOR}.policy_loss.loss_mode"
    mode = str(verl[key] or "vanilla").replace("-", "_")
    if mode in LOSSES:
        answer.set("actor.loss_mode", LOSSES[mode], key)
        updates = updates_of_a_step(verl, "actor")
        if updates > 1 and policy_loss(LOSSES[mode]).updates_per_batch is not None:
            answer.set("actor.allow_stale_updates", True, key)
            text = f"it has no ratio, and a batch takes {updates} updates: all but the first are of an older policy"
            answer.changed(key, text, "actor.allow_stale_updates=true")
    else:
        answer.absent(key, f"there are {', '.join(LOSSES)}; docs/algorithms.md: a new loss is one file")


def estimator(verl: Verl, answer: Answer) -> None:
    """The advantage estimator; GRPO without its deviation has a name of its own."""
    key, norm = within("algorithm", "adv_estimator norm_adv_by_std_in_grpo")
    name = ESTIMATORS.get(str(verl[key]))
    if name is None:
        answer.absent(key, f"there are {', '.join(ESTIMATORS)}; docs/algorithms.md: a new one is one file")
        name = "grpo"
    if name == "grpo" and verl[norm] is False:
        answer.set(key, "dr_grpo", key, norm)
        return
    answer.set(key, name, key)
    if name != "grpo":
        answer.dropped(norm, "read by grpo alone")


def correction(verl: Verl, answer: Answer) -> None:
    """Weights and rejection of the mismatch of sampler and trainer, in verl's three spellings."""
    if any(f"algorithm.{name}" in verl.keys for name in ("rollout_is_level", "rollout_is_mode")):
        _correction_of_0_6_0(verl, answer)
        return
    level, bypass, kind, early = within(CORRECTION, "rollout_is bypass_mode loss_type use_policy_gradient")
    reinforce = verl[kind] == "reinforce" or bool(verl[early])
    if verl[level]:
        _weights(verl, answer, level)
    if verl[bypass] and not reinforce and versions().index(verl.version) < versions().index("0.7.0"):
        answer.dropped(f"{CORRECTION}.rollout_rs", "not read in verl 0.6.1 either, with bypass_mode")
    else:
        _rejection(verl, answer)
    if verl[bypass] and not reinforce:  # verl measures weights then, and leaves them out of the loss
        answer.set("algorithm.off_policy", "bypass", bypass)
    elif verl[bypass]:
        answer.set("actor.loss_mode", "policy_gradient", kind, early, bypass)
        answer.set("actor.ppo_mini_batch_size", verl["data.train_batch_size"], kind, early, bypass)
        answer.entries.append(
            Entry(
                Difference.changed,
                kind if kind in verl.written else early,
                "reinforce",
                "actor.loss_mode=policy_gradient",
                "it has no ratio, and takes one update of a batch",
            )
        )


def _weights(verl: Verl, answer: Answer, level: str) -> None:
    bounds, normalize = within(CORRECTION, "rollout_is_threshold rollout_is_batch_normalize")
    lower, _, upper = str(verl[bounds]).rpartition("_")
    answer.set("algorithm.off_policy", "decoupled", level)
    answer.set(f"{CORRECTION}.level", verl[level], level)
    answer.set(f"{CORRECTION}.mode", "zero" if lower else "truncate", level, bounds)
    answer.set(f"{CORRECTION}.upper", float(upper), level, bounds)
    if lower:
        answer.set(f"{CORRECTION}.lower", float(lower), bounds)
    if verl[normalize]:
        answer.set(f"{CORRECTION}.batch_normalize", True, normalize)


def _rejection(verl: Verl, answer: Answer) -> None:
    reject, most, least, bounds = within(
        CORRECTION, "rollout_rs rollout_rs_threshold rollout_rs_threshold_lower rollout_is_threshold"
    )
    if not verl[reject]:
        return
    name = REJECTIONS.get(str(verl[reject]))
    if name is None:
        answer.absent(reject, f"one of {', '.join(REJECTIONS)}: several criteria at once are not here")
        return
    lower, _, upper = str(verl[most] if verl[most] is not None else verl[bounds]).rpartition("_")
    answer.set(f"{CORRECTION}.reject", name, reject)
    if lower and name == str(verl[reject]):  # since 0.7.1: bounds of p_sampler / p_trainer
        lower, upper = str(1 / float(upper)), str(1 / float(lower))
    answer.set(f"{CORRECTION}.reject_upper", float(upper), reject, most)
    if lower or verl[least] is not None:
        answer.set(f"{CORRECTION}.reject_lower", float(lower or verl[least]), most, least)


def _correction_of_0_6_0(verl: Verl, answer: Answer) -> None:
    switch, level, mode, upper, lower = within(
        "algorithm",
        "rollout_is rollout_is_level rollout_is_mode rollout_is_threshold rollout_is_threshold_lower",
    )
    if not verl[switch] or verl[upper] is None:
        return
    answer.set("algorithm.off_policy", "decoupled", switch)
    answer.set(f"{CORRECTION}.level", verl[level], switch, level)
    answer.set(
        f"{CORRECTION}.mode", "zero" if verl[mode] == "mask" else verl[mode], switch, mode
    )  # the divisor counts them
    answer.set(f"{CORRECTION}.upper", verl[upper], switch, upper)
    if verl[mode] == "mask":
        answer.set(
            f"{CORRECTION}.lower", verl[lower] if verl[lower] is not None else 1 / float(verl[upper]), upper, lower
        )


def sampling(verl: Verl, answer: Answer) -> None:
    """Temperatures; whether greedy is asked for apart depends on how verl samples."""
    base = "rollout" if verl.program == "generate" else "actor_rollout_ref.rollout"
    for group, ours in ((base, "rollout.temperature"), (f"{base}.val_kwargs", "rollout.val_kwargs.temperature")):
        draws, temperature = within(group, "do_sample temperature")
        greedy = verl[draws] is False and verl[f"{base}.mode"] != "async"
        if verl[temperature] is not None:
            answer.set(ours, 0 if greedy else verl[temperature], draws, temperature)


def shares(verl: Verl, answer: Answer) -> None:
    """Memory shares of two engines that are awake at once; verl wakes one at a time, so its shares may exceed 1."""
    drawn, *judges = (
        f"{group}.gpu_memory_utilization"
        for group in ("actor_rollout_ref.rollout", "reward.reward_model.rollout", "reward_model.rollout")
    )
    judged = next((each for each in judges if each in verl.written), judges[0])
    if verl[judged] is None:  # before 0.7.0 no engine served a reward model
        return
    wanted = float(verl[drawn]) + float(verl[judged])
    fits = wanted <= 1 or "trainer.placement" in answer.settings
    for key, ours in ((drawn, "rollout"), (judged, "reward_model")):
        share = verl[key] if fits else round(verl[key] * AWAKE / wanted, 2)
        answer.set(f"{ours}.gpu_memory_utilization", share, key)
        if not fits:
            text = f"verl wakes one engine at a time; here both are awake, and share {AWAKE:g} of a device"
            answer.changed(key, text, f"{ours}.gpu_memory_utilization={share:g}")


def quantisation(verl: Verl, answer: Answer) -> None:
    """Engines in fp8.  A run here weighs what they draw, unless it is told not to."""
    key = "actor_rollout_ref.rollout.quantization"
    if verl[key] in (None, "null", ""):
        return
    if verl[key] != "fp8":
        answer.absent(key, "there is fp8; docs/fp8.md has the others that are here")
        return
    answer.set("rollout.quantization", "fp8_block", key)
    if not answer.settings.keys() & {"algorithm.off_policy"}:
        answer.set("rollout.allow_uncorrected", True, key)
        text = "verl's documentation has an obvious drop without rollout_is: write algorithm.off_policy=decoupled"
        answer.changed(key, text, "rollout.allow_uncorrected=true")


def filtered(verl: Verl, answer: Answer) -> None:
    """Prompts that are sampled at a time, where groups are filtered."""
    key = "data.gen_batch_size"
    if verl[key] and verl["algorithm.filter_groups.enable"]:
        answer.set(key, verl[key], key)


def replicas(verl: Verl, answer: Answer) -> None:
    """Experts that replicas share, and replicas."""
    dp, ep = (f"actor_rollout_ref.rollout.{name}_parallel_size" for name in ("data", "expert"))
    if (verl[ep] or 1) > 1:
        answer.set("rollout.ep", verl[ep], ep)
    elif (verl[dp] or 1) > 1:
        answer.dropped(dp, "replicas are engines of their own, as many as the devices hold")


def generating_replicas(verl: Verl, answer: Answer) -> None:
    """Replicas of verl's generation: its devices."""
    nodes, devices = within("trainer", "nnodes n_gpus_per_node")
    count = int(verl[nodes] or 1) * int(verl[devices] or 1)
    answer.set("rollout.dp", max(1, count // int(verl["rollout.tensor_model_parallel_size"] or 1)), nodes, devices)


def engine_field(verl: Verl, answer: Answer) -> None:
    """Each argument of vLLM's engine that is passed on by name."""
    prefix = "actor_rollout_ref.rollout.engine_kwargs.vllm."
    for key in [each for each in verl.written if each.startswith(prefix)]:
        names = key.removeprefix(prefix).split(".")
        value = verl.written[key]
        field = value  # with a group's name, such as compilation_config, the group of the one value
        for name in reversed(names[1:]):
            field = {name: field}
        row = row_for(key)
        if row is None or row.rule != engine_field.__name__:
            continue
        if value is None:
            answer.dropped(key, "null, as by itself")
        elif violations := VLLM_FIELDS.violations({names[0]: field}, "rollout.engine"):
            answer.absent(key, violations[0].problem)
        else:
            answer.add("rollout.engine", names, value, key)


def loggers(verl: Verl, answer: Answer) -> None:
    """Those that are here."""
    key = "trainer.logger"
    if not verl.has(key):
        answer.entries.append(Entry(Difference.default, key, verl[key], "trainer.logger=[console]", ""))
        return
    wanted = verl[key] if isinstance(verl[key], list) else [verl[key]]
    known = [str(each) for each in wanted if str(each) in Logger.__members__]
    answer.set(key, known or ["console"], key)
    if lost := [str(each) for each in wanted if str(each) not in (*Logger.__members__, "file")]:
        answer.absent(key, f"{', '.join(lost)}: there are {', '.join(Logger.__members__)}")


def samples(verl: Verl, answer: Answer) -> None:
    """Samples are kept by themselves."""
    for key in ("trainer.rollout_data_dir", "trainer.validation_data_dir"):
        answer.dropped(key, "always, in the run directory")


def profiled(verl: Verl, answer: Answer) -> None:
    """Steps that are traced."""
    for key in ("trainer.profile_steps", "global_profiler.steps"):
        if verl[key]:
            answer.set("trainer.profile_steps", verl[key], key)


PER_ROLE: dict[str, Callable[[Verl, Answer, str], None]] = {
    each.__name__: each
    for each in (
        microbatches,
        aggregation,
        warmup,
        decay,
        betas,
        chunks,
        experts,
        recompute,
        pipeline,
        dispatcher,
        balance,
        transformer_field,
        lora,
    )
}
RULES: dict[str, Callable[[Verl, Answer], None]] = {
    each.__name__: each
    for each in (
        clip,
        loss,
        estimator,
        asynchrony,
        agents,
        conversation,
        pictures,
        fine_tuning_batches,
        distillation,
        correction,
        sampling,
        shares,
        quantisation,
        filtered,
        replicas,
        generating_replicas,
        engine_field,
        loggers,
        samples,
        profiled,
    )
}
