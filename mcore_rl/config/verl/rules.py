"""Rules that decide keys of ours from several keys of verl's; ``RULES`` has them by the name that rows give.

A rule is run once, or once for each trained role (``ROLES``).  It asks ``verl[key]``, which is what was written or verl's
default, and tells an ``Answer`` what follows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from mcore_rl.config.algorithm import Rejection
from mcore_rl.config.engine import Dispatcher
from mcore_rl.config.megatron_fields import ALLOWED, REFUSED, TAKEN, megatron_violations
from mcore_rl.config.roles import LossAggregation
from mcore_rl.config.trainer import Logger
from mcore_rl.config.verl.facts import versions
from mcore_rl.config.verl.rows_roles import CLIP, LOSSES
from mcore_rl.config.verl.written import Verl

ROLES = {"actor": "actor_rollout_ref.actor", "critic": "critic"}  # ours -> verl's
LENGTHS = ("data.max_prompt_length", "data.max_response_length")
ESTIMATORS = {name: name for name in ("gae", "grpo", "rloo", "remax", "gpg", "opo", "gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")}  # fmt: skip
ESTIMATORS |= {"rloo_vectorized": "rloo", "grpo_vectorized": "grpo"}
DECAYS = {"constant": "constant", "linear": "linear", "cosine": "cosine", "None": "constant"}
CORRECTION, OURS = "algorithm.rollout_correction", "algorithm.rollout_correction"
REJECTIONS = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"} | {each.value: each.value for each in Rejection}  # fmt: skip
HARMLESS = ("layers that the engine does not use", "Megatron's router", "replaced by the checkpoint's", "inference", "deprecated", "tests or tools")  # fmt: skip


class Kind(Enum):
    """How an entry of the list that ``from-verl`` shows is headed."""

    absent = "Not here, and left out"
    unknown = "Not understood, and left out"
    changed = "Means something else here"
    default = "Another default"
    dropped = "Not needed here"


@dataclass(frozen=True)
class Entry:
    """kind: of the list.  verl, value: the key and what was written.  ours: what stands for it.  text: what is different."""

    kind: Kind
    verl: str
    value: Any
    ours: str = ""
    text: str = ""


@dataclass(frozen=True)
class Setting:
    """A value of a key of ours.  sources: verl's keys that it comes from.  written: whether one of them was written."""

    value: Any
    sources: tuple[str, ...]
    written: bool


@dataclass
class ModelFacts:
    """Of the model that is trained, as far as they are known.  checkpoint: its name in ``mcore-rl models``."""

    num_layers: int | None = None
    is_mixture: bool | None = None
    checkpoint: str = ""


@dataclass
class Answer:
    """What follows from verl's keys: settings of ours, and entries of the list."""

    verl: Verl
    model: ModelFacts = field(default_factory=ModelFacts)
    settings: dict[str, Setting] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)

    def set(self, ours: str, value: Any, *sources: str) -> None:
        """``ours`` is ``value``, which comes from ``sources``; what was written goes before what was not."""
        setting = Setting(value, sources, self.verl.has(*sources))
        known = self.settings.get(ours)
        if known is None or setting.written or not known.written:
            self.settings[ours] = setting

    def add(self, ours: str, names: list[str], value: Any, source: str) -> None:
        """``value`` goes into the group ``ours``, in which any key may be, under ``names`` one below the other."""
        known = self.settings.get(ours)
        group = place = dict(known.value) if known else {}
        for name in names[:-1]:
            place[name] = dict(place.get(name) or {})
            place = place[name]
        place[names[-1]] = value
        self.settings[ours] = Setting(group, (*(known.sources if known else ()), source), written=True)

    def tell(self, kind: Kind, key: str, text: str, ours: str = "") -> None:
        """An entry of the list, if ``key`` was written."""
        if key in self.verl.written:
            self.entries.append(Entry(kind, key, self.verl.written[key], ours, text))


def microbatches(verl: Verl, answer: Answer, role: str) -> None:
    """One budget of tokens: that of verl's dynamic batches, or of its micro batches of the longest sequences."""
    base = ROLES[role]
    dynamic, budget, micro = (f"{base}.{name}" for name in ("use_dynamic_bsz", "ppo_max_token_len_per_gpu", "ppo_micro_batch_size_per_gpu"))  # fmt: skip
    spread = [f"{base}.megatron.context_parallel_size", f"{base}.ulysses_sequence_parallel_size"]
    if verl[dynamic] and verl[budget]:
        cp = next((size for each in spread if (size := verl[each])), 1)
        tokens = int(verl[budget]) * int(cp)
        answer.set(f"{role}.microbatch_tokens", tokens, dynamic, budget, *spread)
        text = f"tokens of a context-parallel group: of a GPU, times context_parallel_size={cp}" if cp != 1 else ""
        answer.tell(Kind.changed, budget if text else "", text, f"{role}.microbatch_tokens={tokens}")
        answer.tell(Kind.dropped, micro, "not read in verl either, with use_dynamic_bsz=True")
    elif verl[micro]:
        longest = sum(int(verl[each]) for each in LENGTHS)
        tokens = int(verl[micro]) * longest
        answer.set(f"{role}.microbatch_tokens", tokens, micro, *LENGTHS)
        text = f"sequences are packed into a budget of tokens: that of {verl[micro]} of the longest, {longest} tokens each"
        answer.tell(Kind.changed, micro, text, f"{role}.microbatch_tokens={tokens}")
        answer.tell(Kind.dropped, budget, "not read in verl either, without use_dynamic_bsz=True")
    answer.tell(Kind.absent, f"{base}.ppo_micro_batch_size", "of all devices together: write ppo_micro_batch_size_per_gpu")


def aggregation(verl: Verl, answer: Answer, role: str) -> None:
    """How losses of tokens become one."""
    base = ROLES[role]
    mode, factor = f"{base}.loss_agg_mode", f"{base}.loss_scale_factor"
    ours = {each.value.replace("_", "-"): each.value for each in LossAggregation}
    ours |= {"seq-mean-token-sum-norm": LossAggregation.sum_over_constant.value}
    if str(verl[mode]) in ours:
        answer.set(f"{role}.loss_agg_mode", ours[str(verl[mode])], mode)
        if versions().index(verl.version) < versions().index("0.7.0"):
            text = "over the whole minibatch; verl's, before 0.7, over each micro batch, and the mean of these"
            answer.tell(Kind.changed, mode, text, f"{role}.loss_agg_mode={ours[str(verl[mode])]}")
    elif verl[mode] is not None:
        answer.tell(Kind.absent, mode, f"there are {', '.join(ours)}")
    if verl[factor] is not None:
        answer.set(f"{role}.loss_agg_constant", verl[factor], factor)


def updates_of_a_step(verl: Verl, role: str) -> int:
    """Optimizer steps in a step of the run."""
    base = ROLES[role]
    batch, mini, epochs = (verl[key] or 1 for key in ("data.train_batch_size", f"{base}.ppo_mini_batch_size", f"{base}.ppo_epochs"))  # fmt: skip
    return max(1, int(batch) // int(mini)) * int(epochs)


def warmup(verl: Verl, answer: Answer, role: str) -> None:
    """verl's scheduler counts steps of the run; ours, optimizer steps."""
    steps, ratio = (f"{ROLES[role]}.optim.{name}" for name in ("lr_warmup_steps", "lr_warmup_steps_ratio"))
    if verl[steps] is not None and int(verl[steps]) > 0:
        updates = updates_of_a_step(verl, role)
        answer.set(f"{role}.optim.lr_warmup_steps", int(verl[steps]) * updates, steps)
        text = f"optimizer steps: verl counts steps of the run, of {updates} optimizer steps each"
        answer.tell(Kind.changed, steps if updates > 1 else "", text, f"{role}.optim.lr_warmup_steps={int(verl[steps]) * updates}")
    elif verl[ratio]:
        answer.set(f"{role}.optim.warmup_ratio", verl[ratio], ratio)


def decay(verl: Verl, answer: Answer, role: str) -> None:
    """The schedule, where it ends, and at which share of the rate."""
    base = f"{ROLES[role]}.optim"
    styles = [f"{base}.{name}" for name in ("lr_decay_style", "warmup_style", "lr_scheduler_type")]
    style = next((each for each in styles if verl[each] is not None), styles[0])
    ours = DECAYS.get(str(verl[style]))
    if ours is None:
        answer.tell(Kind.absent, style, f"there are {', '.join(list(DECAYS)[:3])}; the rate is held after warm-up")
        return
    answer.set(f"{role}.optim.lr_schedule", ours, style)
    ends = [f"{base}.{name}" for name in ("lr_decay_steps", "total_training_steps")]
    least, share = f"{base}.min_lr", f"{base}.min_lr_ratio"
    if ours == "constant":
        for key in (*ends, least, share):
            answer.tell(Kind.dropped, key, "read by a rate that decays alone")
        return
    if end := next((each for each in ends if verl[each] is not None and int(verl[each]) > 0), None):
        updates = updates_of_a_step(verl, role)
        answer.set(f"{role}.optim.total_steps", int(verl[end]) * updates, end)
        text = f"optimizer steps: verl counts steps of the run, of {updates} optimizer steps each"
        answer.tell(Kind.changed, end if updates > 1 else "", text, f"{role}.optim.total_steps={int(verl[end]) * updates}")
    if verl[share]:
        answer.set(f"{role}.optim.min_lr_ratio", verl[share], share)
    elif verl[least]:
        answer.set(f"{role}.optim.min_lr_ratio", float(verl[least]) / float(verl[f"{base}.lr"]), least)


def betas(verl: Verl, answer: Answer, role: str) -> None:
    """Adam's, from the fields of Megatron's optimizer."""
    base = f"{ROLES[role]}.optim"
    keys = [f"{base}.override_optimizer_config.{name}" for name in ("adam_beta1", "adam_beta2")]
    if verl.has(*keys):
        first, second = verl[f"{base}.betas"] or (0.9, 0.999)
        answer.set(f"{role}.optim.betas", [verl[keys[0]] or first, verl[keys[1]] or second], *keys)


def chunks(verl: Verl, answer: Answer, role: str) -> None:
    """Chunks of a pipeline stage, which one stage has not."""
    base = f"{ROLES[role]}.megatron"
    key, pp = f"{base}.virtual_pipeline_model_parallel_size", verl[f"{base}.pipeline_model_parallel_size"]
    if verl[key] and int(pp or 1) > 1:
        answer.set(f"{role}.parallel.vpp", verl[key], key)
    else:
        answer.tell(Kind.dropped, key, "one pipeline stage has no chunks" if verl[key] else "one chunk, the default")


def experts(verl: Verl, answer: Answer, role: str) -> None:
    """Tensor parallelism inside an expert; null is Megatron's tensor_model_parallel_size."""
    base = f"{ROLES[role]}.megatron"
    key, ep = f"{base}.expert_tensor_parallel_size", f"{base}.expert_model_parallel_size"
    if verl[key] not in (None, "None"):
        answer.set(f"{role}.parallel.etp", verl[key], key)
    elif (verl[ep] or 1) > 1 or answer.model.is_mixture:
        answer.set(f"{role}.parallel.etp", verl[f"{base}.tensor_model_parallel_size"] or 1, key, ep)


def recompute(verl: Verl, answer: Answer, role: str) -> None:
    """What is computed again in the backward pass."""
    group = "actor_rollout_ref.model" if role == "actor" else "critic.model"
    switch, fields = f"{group}.enable_gradient_checkpointing", f"{ROLES[role]}.megatron.override_transformer_config"
    granularity, modules = f"{fields}.recompute_granularity", f"{fields}.recompute_modules"
    early = f"{group}.gradient_checkpointing_kwargs.activations_checkpoint_granularity"
    if not verl.is_megatron:
        answer.set(f"{role}.recompute", "full" if verl[switch] else "none", switch)
        return
    key = early if verl[switch] and verl[early] else granularity
    wanted = str(verl[key])
    answer.set(f"{role}.recompute", wanted if wanted in ("selective", "full") else "none", key)
    if wanted == "selective" and verl[modules] not in (None, ["core_attn"]):
        answer.tell(Kind.absent, modules, "core attention alone is recomputed")


def pipeline(verl: Verl, answer: Answer, role: str) -> None:
    """Layers of every chunk, from the numbers of the first and the last stage."""
    base = f"{ROLES[role]}.megatron"
    fields = f"{base}.override_transformer_config"
    first, last, embeds, heads, custom = (f"{fields}.{name}" for name in (
        "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split", "pipeline_model_parallel_layout"))  # fmt: skip
    answer.tell(Kind.absent, custom, f"write {role}.parallel.pipeline_layers")
    pp, vpp = int(verl[f"{base}.pipeline_model_parallel_size"] or 1), int(verl[f"{base}.virtual_pipeline_model_parallel_size"] or 1)  # fmt: skip
    asked = [key for key in (first, last, embeds, heads) if verl[key]]
    if not asked or pp == 1:
        for key in (first, last, embeds, heads):
            answer.tell(Kind.dropped, key, "every stage has as many layers")
        return
    layers = stages(answer.model.num_layers, pp, verl[first], verl[last], bool(verl[embeds]), bool(verl[heads]))
    if layers is None or any(each % vpp for each in layers):
        what = "the model is not known" if answer.model.num_layers is None else f"{answer.model.num_layers} layers do not divide so"
        for key in asked:
            answer.tell(Kind.absent, key, f"{what}: write {role}.parallel.pipeline_layers, {pp * vpp} numbers", f"{role}.parallel.pipeline_layers")  # fmt: skip
        return
    answer.set(f"{role}.parallel.pipeline_layers", [each // vpp for _ in range(vpp) for each in layers], *asked)


def stages(layers: int | None, pp: int, first: int | None, last: int | None, embeds: bool, heads: bool) -> list[int] | None:
    """The layers of each stage as Megatron divides them (transformer_block.py, 0.16.1); None if they do not divide.

    embeds, heads: whether the embedding and the head count as a layer of their stages.
    """
    if layers is None:
        return None
    if first is not None or last is not None:
        rest, middle = layers - int(first or 0) - int(last or 0), pp - (first is not None) - (last is not None)
        if middle <= 0 or rest % middle:
            return None
        return [*([int(first)] if first is not None else []), *[rest // middle] * middle, *([int(last)] if last is not None else [])]  # fmt: skip
    if (layers + embeds + heads) % pp:
        return None
    even = [(layers + embeds + heads) // pp] * pp
    even[0] -= embeds
    even[-1] -= heads
    return even


def dispatcher(verl: Verl, answer: Answer, role: str) -> None:
    """How tokens are sent to experts."""
    fields = f"{ROLES[role]}.megatron.override_transformer_config"
    kind, deepep, backend = (f"{fields}.{name}" for name in ("moe_token_dispatcher_type", "moe_enable_deepep", "moe_flex_dispatcher_backend"))  # fmt: skip
    names = {each.value: each.value for each in Dispatcher} | {"alltoall_seq": "alltoall"}
    wanted = str(verl[kind])
    if wanted in names:
        answer.set(f"{role}.moe.dispatcher", names[wanted], kind, *([deepep] if wanted == "flex" else []))
    elif verl[kind] is not None:
        answer.tell(Kind.absent, kind, f"there are {', '.join(names)}")
    if wanted == "flex" and verl[backend]:
        answer.set(f"{role}.moe.flex_backend", verl[backend], backend)
    if wanted != "flex" and verl[deepep]:
        answer.tell(Kind.dropped, deepep, "read with moe_token_dispatcher_type=flex alone")


def balance(verl: Verl, answer: Answer, role: str) -> None:
    """The load of the experts."""
    fields = f"{ROLES[role]}.megatron.override_transformer_config"
    coeff, kind = f"{fields}.moe_aux_loss_coeff", f"{fields}.moe_router_load_balancing_type"
    if verl[coeff] and verl[kind] not in ("none", "sinkhorn"):
        answer.set(f"{role}.moe.aux_loss", "sequence" if verl[kind] == "seq_aux_loss" else "batch", coeff, kind)
        answer.set(f"{role}.moe.aux_loss_coeff", verl[coeff], coeff, kind)


def transformer_field(verl: Verl, answer: Answer, role: str) -> None:
    """Each field of Megatron's TransformerConfig that no other row is about."""
    prefix = f"{ROLES[role]}.megatron.override_transformer_config."
    others = {"recompute", "pipeline", "dispatcher", "balance"}
    for key in [each for each in verl.written if each.startswith(prefix)]:
        from mcore_rl.config.verl.table import row_for  # rows name rules, which are here

        row, name, value = row_for(key), key.removeprefix(prefix), verl.written[key]
        if row is None or row.rule in others or not row.rule:
            continue
        taken = next((ours for ours, fields in TAKEN.items() if name in fields), "")
        refused = next((why for why, fields in REFUSED.items() if name in fields), "")
        if name in ("gradient_accumulation_fusion", "tp_comm_overlap") and (name == "tp_comm_overlap") == bool(value):
            answer.set(f"{role}.{name}", value, key)
        elif taken:
            said = "the model's config.json says it" if taken == "config.json" else f"follows from {role}.{taken}"
            answer.tell(Kind.dropped, key, said)
        elif name in ALLOWED and not megatron_violations({name: value}):
            answer.add(f"{role}.megatron", [name], value, key)
        elif refused:
            harmless = not value or any(each in refused for each in HARMLESS)
            answer.tell(Kind.dropped if harmless else Kind.absent, key, f"it {refused}")
        else:
            problem = megatron_violations({name: value})[0].problem
            answer.tell(Kind.absent, key, problem)


def clip(verl: Verl, answer: Answer) -> None:
    """The clip range; verl's two ranges go before the one."""
    one, low, high = (f"actor_rollout_ref.actor.{name}" for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"))
    below, above = (verl[one] if verl[each] is None else verl[each] for each in (low, high))
    if below is not None and below == above:
        answer.set("actor.clip_ratio", below, *(each for each in (low, high) if verl[each] is not None), *([one] if verl[low] is None else []))  # fmt: skip
    else:
        answer.set("actor.clip_ratio_low", below, low)
        answer.set("actor.clip_ratio_high", above, high)
    if verl[low] is not None and verl[high] is not None and verl[one] not in (below, None):
        answer.tell(Kind.dropped, one, CLIP)


def loss(verl: Verl, answer: Answer) -> None:
    """The policy loss."""
    key = "actor_rollout_ref.actor.policy_loss.loss_mode"
    mode = str(verl[key] or "vanilla").replace("-", "_")
    if mode in LOSSES:
        answer.set("actor.loss_mode", LOSSES[mode], key)
    else:
        answer.tell(Kind.absent, key, f"there are {', '.join(LOSSES)}; docs/algorithms.md: a new loss is one file")


def estimator(verl: Verl, answer: Answer) -> None:
    """The advantage estimator; GRPO without its deviation has a name of its own."""
    key, norm = "algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo"
    name = ESTIMATORS.get(str(verl[key]))
    if name is None:
        answer.tell(Kind.absent, key, f"there are {', '.join(ESTIMATORS)}; docs/algorithms.md: a new one is one file")
        name = "grpo"
    if name == "grpo" and verl[norm] is False:
        answer.set(key, "dr_grpo", key, norm)
        return
    answer.set(key, name, key)
    if name != "grpo":
        answer.tell(Kind.dropped, norm, "read by grpo alone")


def correction(verl: Verl, answer: Answer) -> None:
    """Weights and rejection of the mismatch of sampler and trainer, in verl's three spellings."""
    if any(f"algorithm.{name}" in verl.keys for name in ("rollout_is_level", "rollout_is_mode")):
        _correction_of_0_6_0(verl, answer)
        return
    level, bounds, bypass = (f"{CORRECTION}.{name}" for name in ("rollout_is", "rollout_is_threshold", "bypass_mode"))
    if verl[level]:
        lower, _, upper = str(verl[bounds]).rpartition("_")
        answer.set(f"{OURS}.level", verl[level], level)
        answer.set(f"{OURS}.mode", "zero" if lower else "truncate", level, bounds)
        answer.set(f"{OURS}.upper", float(upper), level, bounds)
        if lower:
            answer.set(f"{OURS}.lower", float(lower), bounds)
    _rejection(verl, answer)
    kind, early = f"{CORRECTION}.loss_type", f"{CORRECTION}.use_policy_gradient"
    reinforce = verl[kind] == "reinforce" or bool(verl[early])
    if verl[bypass] and reinforce:
        answer.set("actor.loss_mode", "policy_gradient", kind, early, bypass)
        answer.set("actor.ppo_mini_batch_size", verl["data.train_batch_size"], kind, early, bypass)
        answer.entries.append(Entry(Kind.changed, kind if kind in verl.written else early, "reinforce", "actor.loss_mode=policy_gradient", "it has no ratio, and takes one update of a batch"))  # fmt: skip
    elif verl[bypass]:
        answer.set(f"{OURS}.bypass_mode", True, bypass)


def _rejection(verl: Verl, answer: Answer) -> None:
    reject, most, least, bounds = (f"{CORRECTION}.{name}" for name in ("rollout_rs", "rollout_rs_threshold", "rollout_rs_threshold_lower", "rollout_is_threshold"))  # fmt: skip
    if not verl[reject]:
        return
    name = REJECTIONS.get(str(verl[reject]))
    if name is None:
        answer.tell(Kind.absent, reject, f"one of {', '.join(REJECTIONS)}: several criteria at once are not here")
        return
    lower, _, upper = str(verl[most] if verl[most] is not None else verl[bounds]).rpartition("_")
    answer.set(f"{OURS}.reject", name, reject)
    answer.set(f"{OURS}.reject_upper", float(upper), reject, most)
    if lower or verl[least] is not None:
        answer.set(f"{OURS}.reject_lower", float(lower or verl[least]), most, least)


def _correction_of_0_6_0(verl: Verl, answer: Answer) -> None:
    switch, level, mode, upper, lower = (f"algorithm.{name}" for name in ("rollout_is", "rollout_is_level", "rollout_is_mode", "rollout_is_threshold", "rollout_is_threshold_lower"))  # fmt: skip
    if not verl[switch] or verl[upper] is None:
        return
    if verl[level] == "geometric":
        answer.tell(Kind.absent, level, "weights are of tokens or of sequences")
        return
    answer.set(f"{OURS}.level", verl[level], switch, level)
    answer.set(f"{OURS}.mode", verl[mode], switch, mode)
    answer.set(f"{OURS}.upper", verl[upper], switch, upper)
    if verl[mode] == "mask":
        answer.set(f"{OURS}.lower", verl[lower] if verl[lower] is not None else 1 / float(verl[upper]), upper, lower)


def sampling(verl: Verl, answer: Answer) -> None:
    """Temperatures; whether greedy is asked for apart depends on how verl samples."""
    base = "rollout" if verl.program == "generate" else "actor_rollout_ref.rollout"
    for group, ours in ((base, "rollout.temperature"), (f"{base}.val_kwargs", "rollout.val_kwargs.temperature")):
        draws, temperature = f"{group}.do_sample", f"{group}.temperature"
        greedy = verl[draws] is False and verl[f"{base}.mode"] != "async"
        if verl[temperature] is not None:
            answer.set(ours, 0 if greedy else verl[temperature], draws, temperature)


def replicas(verl: Verl, answer: Answer) -> None:
    """Experts that replicas share, and replicas."""
    dp, ep = (f"actor_rollout_ref.rollout.{name}_parallel_size" for name in ("data", "expert"))
    if (verl[ep] or 1) > 1:
        answer.set("rollout.ep", verl[ep], ep)
    elif (verl[dp] or 1) > 1:
        answer.tell(Kind.dropped, dp, "replicas are engines of their own, as many as the devices hold")


def generating_replicas(verl: Verl, answer: Answer) -> None:
    """Replicas of verl's generation: its devices."""
    nodes, devices = "trainer.nnodes", "trainer.n_gpus_per_node"
    count = int(verl[nodes] or 1) * int(verl[devices] or 1)
    answer.set("rollout.dp", max(1, count // int(verl["rollout.tensor_model_parallel_size"] or 1)), nodes, devices)


def loggers(verl: Verl, answer: Answer) -> None:
    """Those that are here."""
    key = "trainer.logger"
    if not verl.has(key):
        answer.entries.append(Entry(Kind.default, key, verl[key], "trainer.logger=[console]", ""))
        return
    wanted = verl[key] if isinstance(verl[key], list) else [verl[key]]
    known = [str(each) for each in wanted if str(each) in Logger.__members__]
    answer.set(key, known, key)
    if lost := [str(each) for each in wanted if str(each) not in Logger.__members__]:
        answer.tell(Kind.absent, key, f"{', '.join(lost)}: there are {', '.join(Logger.__members__)}")


def samples(verl: Verl, answer: Answer) -> None:
    """Samples are kept by themselves."""
    for key in ("trainer.rollout_data_dir", "trainer.validation_data_dir"):
        answer.tell(Kind.dropped, key, "always, in the run directory")


def profiled(verl: Verl, answer: Answer) -> None:
    """Steps that are traced."""
    for key in ("trainer.profile_steps", "global_profiler.steps"):
        if verl[key]:
            answer.set("trainer.profile_steps", verl[key], key)


PER_ROLE: dict[str, Callable[[Verl, Answer, str], None]] = {
    each.__name__: each
    for each in (microbatches, aggregation, warmup, decay, betas, chunks, experts, recompute, pipeline, dispatcher, balance, transformer_field)  # fmt: skip
}
RULES: dict[str, Callable[[Verl, Answer], None]] = {
    each.__name__: each
    for each in (clip, loss, estimator, correction, sampling, replicas, generating_replicas, loggers, samples, profiled)
}
