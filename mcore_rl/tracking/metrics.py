"""The table of every metric that a run may report; other keys are refused, so that names cannot drift.

A key with a placeholder, ``val/{data_source}/accuracy``, is a family: any text may stand for the placeholder, slashes
included.  docs/metrics.md has this table (``markdown``); a test compares the two.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from mcore_rl.config.role import Head, Role
from mcore_rl.config.role_table import ROLES

Reduction = Literal["mean", "std", "min", "max", "sum", "last"]


@dataclass(frozen=True)
class Metric:
    """One row.

    key: in metrics.jsonl.  unit: "share" is a part of one, "1" has no unit.  reduction: how the many numbers of a step
    become one.  help: what it measures.  short: for a column or a legend.  better: the wanted direction; None if
    neither is better by itself.
    """

    key: str
    unit: str
    reduction: Reduction
    help: str
    short: str
    better: Literal["up", "down"] | None = None


def _validated(row: Metric) -> Metric:
    """The same number of the validation files."""
    section, _, name = row.key.partition("/")
    return replace(row, key=f"{section}/val_{name}", help=f"as {row.key}, validation files", short=f"val {row.short}")


_REWARD = (
    Metric("reward/mean", "reward", "mean", "of a response, as graded, over all of the step", "reward", "up"),
    Metric("reward/std", "reward", "std", "over all responses of the step", "reward std"),
    Metric("reward/min", "reward", "min", "of a response", "reward min"),
    Metric("reward/max", "reward", "max", "of a response", "reward max"),
    Metric("reward/accuracy", "share", "mean", "responses whose answer is right", "acc", "up"),
    Metric("reward/part/{name}", "reward", "mean", "a part of the reward that its grader names", "part", "up"),
)

_SAMPLES = (
    Metric("response/length_mean", "tokens", "mean", "of a response", "length"),
    Metric("response/length_min", "tokens", "min", "of a response", "length min"),
    Metric("response/length_max", "tokens", "max", "of a response", "length max"),
    Metric("response/clip_share", "share", "mean", "responses cut off at data.max_response_length", "cut", "down"),
    Metric("prompt/length_mean", "tokens", "mean", "of a prompt", "prompt"),
    Metric("prompt/length_max", "tokens", "max", "of a prompt", "prompt max"),
    Metric("dropped/groups", "groups", "sum", "without signal, replaced by fresh prompts (filter_groups)", "filtered"),
    Metric(
        "dropped/generation_batches", "batches", "sum", "of prompts drawn for this step; 1 is none in vain", "draws"
    ),
    Metric("dropped/masked_sequences", "responses", "sum", "not trained, because they were cut off", "masked", "down"),
    Metric(
        "dropped/grader_errors", "responses", "sum", "whose grader raised, hung or gave no number", "errors", "down"
    ),
)

_AGENTS = (
    Metric("agent/turns_mean", "turns", "mean", "of the model, of an episode that an agent ran", "turns"),
    Metric("agent/turns_max", "turns", "max", "of the model, of an episode", "turns max"),
    Metric("agent/calls_mean", "calls", "mean", "of tools, of an episode", "calls"),
    Metric("agent/failed_call_share", "share", "mean", "calls that were wrong, or whose tool failed", "failed", "down"),
    Metric("agent/tool_s_mean", "s", "mean", "in which tools of an episode ran", "tool s"),
    Metric("agent/tool_s_max", "s", "max", "in which tools of an episode ran", "tool s max"),
    Metric(
        "agent/engines_idle_s", "s", "sum", "in which nothing was drawn, since all waited for tools", "idle", "down"
    ),
    Metric("agent/trained_share", "share", "mean", "tokens after the prompt that the model drew", "trained"),
    Metric(
        "agent/cached_tokens_mean", "tokens", "mean", "before a turn, cached, over the turns of an episode", "cached"
    ),
    Metric("agent/turn_reward_mean", "reward", "mean", "of the turns of an episode, by whoever gave them", "turns"),
    Metric("agent/lost", "episodes", "sum", "not trained, because an interaction or an engine failed", "lost", "down"),
    Metric(
        "agent/conversations_mean", "episodes", "mean", "of a run of a user's program, trained each", "conversations"
    ),
    Metric("agent/rewritten_share", "share", "mean", "conversations that a user's program rewrote", "rewritten"),
    Metric("agent/end/{reason}", "share", "mean", "episodes that ended for this reason; other: your own", "ends"),
)

_AGREEMENT = (
    Metric(
        "rollout/staleness_mean", "versions", "mean", "of the weights, from a trained token's to the step's", "stale"
    ),
    Metric(
        "rollout/staleness_max", "versions", "max", "of the weights, from a trained token's to the step's", "stale max"
    ),
    Metric("rollout/stale_token_share", "share", "mean", "trained tokens of older weights than the step's", "older"),
    Metric("rollout/resumed_share", "share", "mean", "responses that went on under new weights", "resumed"),
    Metric("rollout/versions_max", "versions", "max", "of the weights that drew one response", "versions"),
    Metric("rollout/buffer", "groups", "last", "finished, and left for later steps (trainer.mode=async)", "buffer"),
    Metric("rollout/under_way", "groups", "last", "unfinished when the step got its rollouts", "under way"),
    Metric("rollout/kept_tokens", "tokens", "last", "of unfinished responses that wait for the next step", "kept"),
    Metric("rollout/redrawn", "groups", "sum", "drawn again, or in part, after an engine died", "redrawn", "down"),
    Metric(
        "rollout/prefix_hit_share", "share", "mean", "tokens before a drawn turn, cached by its engine", "hits", "up"
    ),
    Metric("rollout/held_s", "s", "sum", "waited for groups that were due before others could be trained", "held"),
    Metric("rollout/logprob_diff_mean", "nats", "mean", "|trainer - sampler| of a trained token", "logp diff", "down"),
    Metric("rollout/logprob_diff_max", "nats", "max", "|trainer - sampler| of a trained token", "diff max", "down"),
    Metric("rollout/kl", "nats", "mean", "KL(sampler || trainer) of a trained token, k3", "sampler KL", "down"),
    Metric("rollout/kl_k1", "nats", "mean", "KL(sampler || trainer) of a trained token, k1", "sampler KL k1"),
    Metric("rollout/ratio_mean", "1", "mean", "trainer / sampler, of a token, or what level weighs", "IS ratio"),
    Metric("rollout/ratio_max", "1", "max", "trainer / sampler, of a token, or what level weighs", "IS ratio max"),
    Metric("rollout/ratio_min", "1", "min", "trainer / sampler, of a token, or what level weighs", "IS ratio min"),
    Metric(
        "rollout/effective_sample_size",
        "share",
        "mean",
        "(sum r)^2 / (n sum r^2) of these ratios; 1 is all samples",
        "ESS",
        "up",
    ),
    Metric("rollout/truncated_share", "share", "mean", "of these ratios, those above upper", "truncated", "down"),
    Metric("rollout/masked_share", "share", "mean", "trained tokens left out of the loss", "left out", "down"),
)

_JUDGE = (
    Metric("judge/requests", "requests", "sum", "to the judge, since the step before", "judged"),
    Metric("judge/cached", "responses", "sum", "whose judgement was there, or under way", "cached"),
    Metric("judge/retries", "requests", "sum", "to the judge once more: 429, 5xx, timeouts", "retries", "down"),
    Metric("judge/failed", "responses", "sum", "that the judge gave no score", "unjudged", "down"),
    Metric("judge/prompt_tokens", "tokens", "sum", "that the judge read", "judge read"),
    Metric("judge/completion_tokens", "tokens", "sum", "that the judge wrote", "judge wrote"),
    Metric("judge/seconds", "s", "sum", "of requests to the judge, which overlap", "judge s", "down"),
    Metric("judge/cost", "currency", "last", "of all judgements in the run directory", "judge cost"),
)

_ADVANTAGES = (
    Metric("advantage/mean", "reward", "mean", "over trained tokens, without a teacher's part", "adv"),
    Metric("advantage/std", "reward", "std", "over trained tokens, without a teacher's part", "adv std"),
    Metric("advantage/min", "reward", "min", "over trained tokens, without a teacher's part", "adv min"),
    Metric("advantage/max", "reward", "max", "over trained tokens, without a teacher's part", "adv max"),
    Metric("return/mean", "reward", "mean", "over trained tokens", "return"),
    Metric("value/mean", "reward", "mean", "the critic's, over trained tokens, before its update", "value"),
    Metric("value/explained_variance", "1", "mean", "1 - var(return - value) / var(return)", "expl var", "up"),
    Metric("kl/reward", "nats", "mean", "to the reference, of a response", "KL reward"),
    Metric("kl/reward_per_token", "nats", "mean", "over responses, of their tokens' mean", "KL reward per token"),
    Metric("kl/loss", "nats", "mean", "to the reference, of a trained token: what the loss adds", "KL loss"),
    Metric("kl/coef", "1", "last", "of the KL in the reward or in the loss", "KL coef"),
    Metric(
        "distill/reverse_kl",
        "nats",
        "mean",
        "KL(policy || teacher) of a trained token; k1 of the drawn",
        "teacher KL",
        "down",
    ),
    Metric("distill/forward_kl", "nats", "mean", "KL(teacher || policy) of a trained token", "forward KL", "down"),
    Metric("distill/forward_kl_max", "nats", "max", "KL(teacher || policy) of a trained token", "forward KL max"),
    Metric("distill/jensen_shannon", "nats", "mean", "generalized JSD of a trained token", "teacher JSD", "down"),
    Metric("distill/jensen_shannon_max", "nats", "max", "generalized JSD of a trained token", "teacher JSD max"),
    Metric(
        "distill/reverse_kl/{data_source}",
        "nats",
        "mean",
        "of tokens that this source's teacher teaches; teacher.path: all other sources",
        "teacher KL",
        "down",
    ),
    Metric("distill/forward_kl/{data_source}", "nats", "mean", "as distill/reverse_kl/*", "forward KL", "down"),
    Metric("distill/jensen_shannon/{data_source}", "nats", "mean", "as distill/reverse_kl/*", "teacher JSD", "down"),
    Metric("distill/reverse_kl_std", "nats", "std", "log(policy / teacher), over trained tokens", "teacher KL std"),
    Metric("distill/reverse_kl_max", "nats", "max", "log(policy / teacher) of a trained token", "teacher KL max"),
)


_OF_OWN_LOSS = "{role}/{metric}"


def _of_trained(name: str) -> tuple[Metric, ...]:
    """What every role that is trained reports, under its name."""
    return (
        Metric(f"{name}/loss", "1", "mean", "over minibatches, all terms", f"{name} loss"),
        Metric(f"{name}/grad_norm", "1", "mean", "global L2 norm before clipping, over minibatches", f"{name} grad"),
        Metric(f"{name}/lr", "1", "last", "learning rate", f"{name} lr"),
        Metric(
            f"{name}/skipped_updates", "updates", "sum", "left out for a loss or gradient not finite", "skipped", "down"
        ),
    )


def _of_loss(role: Role) -> tuple[Metric, ...]:
    """Whatever the loss of a role on request reports under the role's name."""
    name = role.name
    return (Metric(f"{name}/{{metric}}", "1", "mean", "of its loss, over trained tokens", name),)


_UPDATES = (
    *(metric for role in ROLES.values() if role.trains for metric in _of_trained(role.name)),
    *_of_trained("{role}"),  # that a user's file brings
    *(metric for role in ROLES.values() if role.trains and role.on_request for metric in _of_loss(role)),
    Metric("actor/{metric}", "1", "mean", "what a policy loss of your file reports, over trained tokens", "actor"),
    Metric(_OF_OWN_LOSS, "1", "mean", "what the loss of a role of your file reports, over trained tokens", "role"),
    Metric("actor/entropy", "nats", "mean", "of the policy at a trained token", "entropy"),
    Metric(
        "actor/kl_k1", "nats", "mean", "old policy (with bypass the sampler) to new, k1, of a trained token", "KL k1"
    ),
    Metric("actor/kl_k3", "nats", "mean", "old policy (with bypass the sampler) to new, k3, of a trained token", "KL"),
    Metric("actor/clip_fraction_low", "share", "mean", "trained tokens clipped at the lower bound", "clip low"),
    Metric("actor/clip_fraction_high", "share", "mean", "trained tokens clipped at the upper bound", "clip high"),
    Metric("actor/clip_fraction_dual", "share", "mean", "trained tokens bounded by clip_ratio_c", "clip dual"),
    Metric("actor/selected_fraction", "share", "mean", "trained tokens that clip_cov or kl_cov selected", "selected"),
    Metric("actor/ratio_mean", "1", "mean", "new to old probability of a trained token, all minibatches", "ratio mean"),
    Metric("actor/ratio_max", "1", "max", "new to old probability of a trained token, all minibatches", "ratio max"),
    Metric("actor/ratio_min", "1", "min", "new to old probability of a trained token, all minibatches", "ratio min"),
    Metric(
        "actor/ratio_first",
        "1",
        "mean",
        "new to old probability, first minibatch; 1 if all is well, but with off_policy=bypass",
        "ratio",
    ),
    Metric("critic/clip_fraction", "share", "mean", "trained tokens whose value was clipped", "value clip"),
    Metric(
        "process_reward/accuracy", "share", "mean", "responses whose outcome it told, before its update", "told", "up"
    ),
    Metric(
        "process_reward/pair_accuracy", "share", "mean", "right responses above wrong ones of a prompt", "pairs", "up"
    ),
    Metric("process_reward/reward", "reward", "mean", "of a response: the sum of its process rewards", "process"),
    Metric("router/load_max", "1", "max", "load of an expert over its fair share, over layers", "load max", "down"),
    Metric("router/load_min", "1", "min", "load of an expert over its fair share, over layers", "load min", "up"),
    Metric("router/load_entropy", "nats", "mean", "of the experts' loads, over layers", "load entropy", "up"),
    Metric("router/difference", "share", "mean", "replayed choices that the router would not make", "routes", "down"),
    Metric("router/{name}", "1", "mean", "another statistic of the routers (training/routing.py)", "router"),
)

_SUPERVISED = (
    Metric("sft/loss", "nats", "mean", "cross entropy of a trained token of the batch", "loss", "down"),
    Metric("sft/val_loss", "nats", "mean", "cross entropy of a trained token, validation files", "val loss", "down"),
)

_PICTURES = (
    Metric("pictures/count", "pictures", "sum", "of the sequences that a step trains", "pictures"),
    Metric("pictures/different", "pictures", "sum", "of these, each once: what is decoded and sent", "different"),
    Metric("pictures/patches", "patches", "sum", "of the sequences that a step trains", "patches"),
    Metric("pictures/token_share", "share", "mean", "tokens that stand for pictures", "picture tokens"),
)

_PAIRS = (
    Metric("pairs/count", "pairs", "sum", "pairs of a step that are trained", "pairs"),
    Metric("pairs/missing_share", "share", "mean", "of what could be pairs: scores were equal, say", "missing"),
    Metric("pairs/same_share", "share", "mean", "pairs of twice the same response, which teach nothing", "same"),
    Metric("pairs/score_gap", "1", "mean", "score of the preferred response less that of the other", "score gap"),
    Metric("pairs/accuracy", "share", "mean", "as prefer/accuracy, of a step's pairs", "accuracy", "up"),
    Metric("pairs/margin", "1", "mean", "as prefer/margin, of a step's pairs", "margin", "up"),
    Metric("pairs/chosen_reward", "1", "mean", "beta times the log-ratio of a preferred response", "chosen"),
    Metric("pairs/rejected_reward", "1", "mean", "the same of the other response", "rejected"),
    Metric("pairs/chosen_logprob", "nats", "mean", "log-prob of a whole preferred response", "chosen log-prob"),
    Metric("pairs/rejected_logprob", "nats", "mean", "the same of the other response", "other log-prob"),
)

_PAIRS_OF_FILES = (
    Metric("prefer/loss", "1", "mean", "loss of a pair, or with kto of a response", "loss", "down"),
    Metric("prefer/accuracy", "share", "mean", "pairs whose preferred answer has the higher reward", "accuracy", "up"),
    Metric("prefer/margin", "1", "mean", "reward of preferred answers less that of others", "margin", "up"),
    Metric("prefer/chosen_reward", "1", "mean", "beta times the log-ratio of a preferred answer", "chosen"),
    Metric("prefer/rejected_reward", "1", "mean", "the same of an answer that is not preferred", "rejected"),
    Metric("prefer/chosen_logprob", "nats", "mean", "log-prob of a whole preferred answer", "chosen log-prob"),
    Metric("prefer/rejected_logprob", "nats", "mean", "the same of an answer that is not preferred", "other log-prob"),
)

_PREFERRED = (
    *_PAIRS_OF_FILES,
    Metric("prefer/kl", "nats", "mean", "kto's estimate of the KL to the reference, of an answer", "KL"),
    *map(_validated, _PAIRS_OF_FILES),
)

_SCORED = (
    Metric("reward/margin", "1", "mean", "score of preferred answers less that of others", "margin", "up"),
    Metric("reward/chosen_score", "1", "mean", "of a preferred answer", "chosen"),
    Metric("reward/rejected_score", "1", "mean", "of an answer that is not preferred", "rejected"),
    Metric("reward/score", "1", "mean", "of a labelled answer", "score"),
)

_SCORES = (
    Metric("reward/loss", "1", "mean", "of mcore-rl reward: loss of a pair, or of a labelled answer", "loss", "down"),
    Metric(
        "reward/train_accuracy", "share", "mean", "pairs or outcomes of the batch that scores tell", "accuracy", "up"
    ),
    *_SCORED,
    Metric("reward/val_loss", "1", "mean", "as reward/loss, validation files", "val loss", "down"),
    Metric("reward/val_accuracy", "share", "mean", "as reward/train_accuracy, validation files", "val accuracy", "up"),
    Metric("reward/val_ece", "share", "mean", "expected calibration error, validation files", "val ECE", "down"),
    Metric("reward/val_correlation", "1", "mean", "of scores and labels (Pearson), validation files", "val r", "up"),
    *map(_validated, _SCORED),
)

_VALIDATION = (
    Metric("val/{data_source}/accuracy", "share", "mean", "validation samples whose answer is right", "val", "up"),
    Metric("val/{data_source}/reward", "reward", "mean", "of a validation sample", "val reward", "up"),
    Metric("val/{data_source}/response_length", "tokens", "mean", "of a validation sample", "val length"),
    Metric("val/{data_source}/clip_share", "share", "mean", "validation samples cut off at the limit", "cut", "down"),
    Metric("val/{data_source}/prompts", "prompts", "sum", "that were validated", "val prompts"),
    Metric("val/{data_source}/lost", "episodes", "sum", "of agents, in no other mean: see agent/lost", "lost", "down"),
)

_PERFORMANCE = (
    Metric("perf/generated_tokens_per_s", "tokens/s", "mean", "of responses: a step's, over draw_s", "tok/s", "up"),
    Metric("perf/draw_s", "s", "last", "for drawing and grading the responses, whenever it was", "drawing"),
    Metric("perf/trained_tokens_per_s", "tokens/s", "mean", "of the batch, while updating", "trained tok/s", "up"),
    Metric("perf/mfu", "share", "mean", "of updates: tflops_per_device over the device's peak", "MFU", "up"),
    Metric("perf/mfu_logprobs", "share", "mean", "the same of log-probs and values", "MFU of log-probs", "up"),
    Metric("perf/tflops_per_device", "TFLOP/s", "mean", "tflop_updates, while updating", "updates", "up"),
    Metric("perf/tflops_per_device_logprobs", "TFLOP/s", "mean", "tflop_logprobs, while scoring", "log-probs", "up"),
    Metric("perf/tflop_updates", "TFLOP", "sum", "that the models need for the step's updates", "TFLOP of updates"),
    Metric(
        "perf/shared_prompts", "share", "mean", "of an update's tokens, those of prompts not repeated", "shared", "up"
    ),
    Metric("perf/tflop_logprobs", "TFLOP", "sum", "that they need for log-probs and values", "TFLOP of log-probs"),
    Metric(
        "perf/memory_host_gib", "GiB", "max", "resident, of the policy's processes together, on CPU", "host", "down"
    ),
    Metric("perf/host_cpu_share", "share", "mean", "of the controller's machine: processors in use", "processors"),
    Metric("perf/host_memory_share", "share", "max", "of the controller's machine: memory in use", "memory", "down"),
    Metric("perf/memory_device_gib", "GiB", "max", "peak allocated, of a device", "device", "down"),
    Metric("perf/balance", "1", "max", "tokens of a data-parallel rank over the mean; 1 is even", "balance", "down"),
    Metric("perf/overhead_share", "share", "mean", "of the step that no phase accounts for", "overhead", "down"),
    Metric(
        "perf/engines_idle_share",
        "share",
        "mean",
        "of the step, in which an engine neither drew nor changed weights",
        "engines idle",
        "down",
    ),
    Metric(
        "perf/trainer_idle_share",
        "share",
        "mean",
        "of the step, in which the trainer waited for rollouts, or the controller worked",
        "trainer idle",
        "down",
    ),
    Metric("perf/checkpoint_s", "s", "last", "from its begin to its name, of the last one that was finished", "save s"),
    Metric("perf/checkpoint_gib", "GiB", "last", "of that checkpoint, on the disk", "checkpoint"),
    Metric("perf/failed_saves", "saves", "sum", "that failed since the last step; each is tried again", "lost", "down"),
    Metric("progress/epoch", "epochs", "last", "of the training data seen", "epoch"),
)

_SAYS = {Head.lm: "log-probs", Head.value: "values", Head.hidden: "hidden states"}
_TRAINED = sorted((role for role in ROLES.values() if role.trains), key=lambda role: role.publishes)  # as a step does
_UPDATES_OF = {role: (role.update_phase, f"the {role.name} is trained") for role in _TRAINED}

# The order of the report's bars: passes, the estimation, updates.  In a step, PRIME's update comes before it.
PHASES = {
    "generate": "responses are drawn",
    "score": "responses are graded, as far as drawing does not hide it",
    **{role.phase: f"the {role.name}'s {_SAYS[role.head]}" for role in ROLES.values()},
    "advantages": "rewards become advantages, on the controller",
    **dict(_UPDATES_OF.values()),
    "sync": "weights go to the rollout engines",
    "validate": "validation, drawing and grading included",
    "save": "the step waits for a checkpoint or an export; of the one before, as a rule",
}

# Phases of a role that a user's file brings.
_OWN_SCORES = "{role}_scores"
_OWN_UPDATE = "update_{role}"
_OWN_PHASE = re.compile(r"\w+_scores|update_\w+")


def is_phase(name: str) -> bool:
    """Whether ``name`` is a phase of a step; a role that a user's file brings has phases of its own."""
    return name in PHASES or _OWN_PHASE.fullmatch(name) is not None


_TIME = (
    *(Metric(f"time/{phase}", "s", "sum", what, phase, "down") for phase, what in PHASES.items()),
    Metric(f"time/{_OWN_SCORES}", "s", "sum", "a pass of a role that your file brings", "scores", "down"),
    Metric(f"time/{_OWN_UPDATE}", "s", "sum", "the updates of a role that your file brings", "update", "down"),
    Metric("time/step", "s", "sum", "the whole step", "seconds", "down"),
    Metric("time/{phase}/{part}", "s", "sum", "a part of a phase; it is in the phase's own time too", "part", "down"),
)

METRICS: tuple[Metric, ...] = (
    *_REWARD,
    *_JUDGE,
    *_SUPERVISED,
    *_PICTURES,
    *_PAIRS,
    *_PREFERRED,
    *_SCORES,
    *_VALIDATION,
    *_SAMPLES,
    *_AGENTS,
    *_AGREEMENT,
    *_ADVANTAGES,
    *_UPDATES,
    *_PERFORMANCE,
    *_TIME,
)


def metric_of(key: str) -> Metric:
    """The row of ``key``.  AssertionError if there is none: add a metric here before you report it."""
    return matched(key)[0]


@cache
def matched(key: str) -> tuple[Metric, dict[str, str]]:
    """The row of ``key``, and what stands for its placeholders.  AssertionError: see ``metric_of``."""
    for metric, pattern in _patterns():
        if match := pattern.fullmatch(key):
            return metric, match.groupdict()
    raise AssertionError(f"{key}: no such metric. Name it in mcore_rl/tracking/metrics.py, or mend the spelling")


def is_metric(key: str) -> bool:
    """Find whether ``key`` has a row."""
    return any(pattern.fullmatch(key) for _, pattern in _patterns())


@cache
def _patterns() -> tuple[tuple[Metric, re.Pattern[str]], ...]:
    """(row, pattern of its key); rows without a placeholder come first, so that they win over families.

    A role of a user's file has no name of a section of ours, so that a misspelling in one stays unknown, but for
    ``actor/``, where losses of users report.
    """
    rows = sorted(METRICS, key=lambda metric: "{" in metric.key)
    sections = {row.key.partition("/")[0] for row in rows} - {"{role}"}
    foreign = rf"(?!(?:{'|'.join(sorted(sections))})/)(?P<role>\w+)/(?P<metric>\w+)"
    patterns = (
        foreign if row.key == _OF_OWN_LOSS else re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>.+)", re.escape(row.key))
        for row in rows
    )
    return tuple(zip(rows, map(re.compile, patterns), strict=True))


def markdown() -> str:
    """The table of docs/metrics.md, one line a metric."""
    lines = ["| key | unit | reduction | better | what |", "|---|---|---|---|---|"]
    for row in METRICS:
        what = row.help.replace("|", "\\|")
        lines.append(f"| `{row.key}` | {row.unit} | {row.reduction} | {row.better or ''} | {what} |")
    return "\n".join(lines) + "\n"
