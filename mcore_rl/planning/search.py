"""Searches the layouts of a run that fit a cluster, fastest first, and counts why others were refused.

Training and rollout share devices, but affect each other in two numbers only: the memory of a device while weights are
sent, and the time that this takes.  So layouts of each are evaluated separately, by the planner, and the fastest are
paired.  The best pairs are then planned as a whole before they are returned.  All trained roles have one layout.
Fine-tuning has no rollout.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import log2

from mcore_rl.config.cluster import ClusterConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.offline import OfflineConfig
from mcore_rl.config.pairs import sequences_per_prompt
from mcore_rl.config.parallel import AXES
from mcore_rl.config.placement import engine_place_violations, with_replicas
from mcore_rl.config.rollout import ROLLOUT_AXES, UPDATE_BUCKET_BYTES, RolloutConfig, rollout_violations
from mcore_rl.config.run import RunConfig
from mcore_rl.config.stages import Pass, Update
from mcore_rl.config.step_plan import step_plan
from mcore_rl.config.trainer import Placement
from mcore_rl.ground.errors import ConfigError
from mcore_rl.parallel.layout import divisors
from mcore_rl.planning.distillation import output_bytes
from mcore_rl.planning.layouts import LEAST_MICROBATCH, Training, trainings
from mcore_rl.planning.lengths import mean_lengths
from mcore_rl.planning.overheads import GIB, ProcessMemory
from mcore_rl.planning.peaks import Phase, Place, Plan
from mcore_rl.planning.plan import (
    offline_seconds,
    offline_work,
    plan,
    prompt_pictures,
    rl_work,
    role_plan,
    site_of,
    updates_of,
)
from mcore_rl.planning.serving import Serving, serving
from mcore_rl.planning.states import family_for
from mcore_rl.planning.timing import Rates, generation_s, pass_s, update_s, weights_s
from mcore_rl.planning.training import RolePlan, engine_lora
from mcore_rl.weights.quantised_shards import shard_violations

SHARES = (0.4, 0.5, 0.6, 0.7, 0.8, 0.85)  # shares of a device to try for a colocated engine
SEPARATE_SHARE = 0.9
Others = Mapping[str, ModelConfig]  # of roles with models of their own, by role
NONE: Others = {}
PAIRED = 200  # so many of the fastest training layouts are paired


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A run that fits.  overrides: how to configure it.  reasons: its rank and its limits, in words."""

    run: RunConfig | OfflineConfig
    plan: Plan
    overrides: tuple[str, ...]
    reasons: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Found:
    """The result of a search.

    best: the fastest first.  refused: the number of refused settings, by reason.  considered: the number of settings
    evaluated.  seconds: how long the search took.
    """

    best: tuple[Candidate, ...]
    refused: Counter[str]
    considered: int
    seconds: float


@dataclass(frozen=True)
class _Rollout:
    config: RolloutConfig
    room: Serving
    seconds: float


@dataclass(frozen=True)
class _Option:
    """A training layout with a rollout layout.  seconds: of a step, estimated.  run: with both layouts."""

    seconds: float
    training: Training
    run: RunConfig | OfflineConfig


def search(
    run: RunConfig | OfflineConfig,
    model: ModelConfig,
    cluster: ClusterConfig,
    others: Others = NONE,
    *,
    limit: int = 10,
) -> Found:
    """The ``limit`` fastest layouts of ``run`` on ``trainer.nnodes`` nodes of ``cluster``, which has accelerators.

    Only layouts, microbatches, recompute and the engine's memory share change, so that the training result does not.
    others: as in ``plan``; the layouts of frozen roles stay.
    """
    assert cluster.gpus_per_node > 0, "layouts are searched for accelerators"
    begin = time.perf_counter()
    run = with_replicas(run, on_accelerators=True)
    refused: Counter[str] = Counter()
    if isinstance(run, RunConfig):
        options, considered = _run_options(run, model, cluster, others, refused)
    else:
        options, considered = _offline_options(run, model, cluster, refused)
    best: dict[str, _Option] = {}
    for option in sorted(options, key=lambda each: each.seconds):
        best.setdefault(str(option.training.parallel), option)
    candidates: list[Candidate] = []
    for option in best.values():
        if len(candidates) == limit:
            break
        planned = plan(option.run, model, cluster, others)
        if planned.fits:
            fastest = candidates[0].plan.step_s if candidates else planned.step_s
            reasons = _reasons(planned, option.training, fastest)
            overrides = overrides_of(option.run)
            candidates.append(Candidate(run=option.run, plan=planned, overrides=overrides, reasons=reasons))
        else:
            refused[f"does not fit whole: {planned.violations[0].problem.split(' needs ')[0]}"] += 1
    candidates.sort(key=lambda each: each.plan.step_s)
    return Found(best=tuple(candidates), refused=refused, considered=considered, seconds=time.perf_counter() - begin)


def fastest_by_rollout(
    run: RunConfig, model: ModelConfig, cluster: ClusterConfig, others: Others = NONE
) -> list[Candidate]:
    """For every tensor-parallel size of the engines that fits, the fastest run."""
    run, refused = with_replicas(run, on_accelerators=True), Counter[str]()
    options, _ = _run_options(run, model, cluster, others, refused)
    best: dict[int, Candidate] = {}
    for option in sorted(options, key=lambda each: each.seconds):
        assert isinstance(option.run, RunConfig)
        if (size := option.run.rollout.tp) in best:
            continue
        planned = plan(option.run, model, cluster, others)
        if planned.fits:
            reasons = _reasons(planned, option.training, planned.step_s)
            best[size] = Candidate(run=option.run, plan=planned, overrides=overrides_of(option.run), reasons=reasons)
    return list(best.values())


def nearest_that_fit(
    run: RunConfig | OfflineConfig,
    model: ModelConfig,
    cluster: ClusterConfig,
    others: Others = NONE,
    *,
    count: int = 3,
) -> list[Candidate]:
    """The ``count`` runs that fit and differ least from ``run``."""
    run = with_replicas(run, on_accelerators=True)
    fitting = search(run, model, cluster, others, limit=60).best
    return sorted(fitting, key=lambda each: (_distance(run, each.run), each.plan.step_s))[:count]


def refusal(
    planned: Plan, run: RunConfig | OfflineConfig, model: ModelConfig, cluster: ClusterConfig, others: Others = NONE
) -> ConfigError:
    """The error for a run that does not fit: its violations, the last with the nearest settings that fit as remedy."""
    assert planned.violations, "a run that fits is not refused"
    violations = list(planned.violations)
    if cluster.gpus_per_node:
        run = with_replicas(run, on_accelerators=True)
        near = nearest_that_fit(run, model, cluster, others)
        texts = "; ".join(" ".join(_changes(run, each.run)) for each in near)
        nodes = f"{run.trainer.nnodes} x {run.trainer.n_gpus_per_node} devices of {cluster.name or 'this cluster'}"
        hint = f"Nearest settings that fit: {texts}" if near else f"No layout fits {nodes}: take more nodes"
        violations[-1] = replace(violations[-1], remedy=f"{violations[-1].remedy}. {hint}")
    return ConfigError(violations)


def _changes(run: RunConfig | OfflineConfig, other: RunConfig | OfflineConfig) -> list[str]:
    """The overrides that turn ``run`` into ``other``."""
    before = set(overrides_of(run))
    return [each for each in overrides_of(other) if each not in before]


def overrides_of(run: RunConfig | OfflineConfig) -> tuple[str, ...]:
    """The overrides that configure the layouts of ``run``."""
    layout = run.actor.parallel
    overrides = [f"actor.parallel.{axis}={getattr(layout, axis)}" for axis in AXES]
    if layout.pipeline_layers is not None:
        overrides.append(f"actor.parallel.pipeline_layers=[{','.join(map(str, layout.pipeline_layers))}]")
    overrides += [
        f"actor.recompute={run.actor.recompute.value}",
        f"actor.microbatch_tokens={run.actor.microbatch_tokens}",
    ]
    if isinstance(run, OfflineConfig):
        return tuple(overrides)
    for row in run.trained_rows:
        if not row.publishes:
            overrides += [each.replace("actor.", f"{row.name}.", 1) for each in overrides if each.startswith("actor.")]
    overrides += [f"rollout.{axis}={getattr(run.rollout, axis)}" for axis in ROLLOUT_AXES]
    return (*overrides, f"rollout.gpu_memory_utilization={run.rollout.gpu_memory_utilization:g}")


def _offline_options(
    config: OfflineConfig, model: ModelConfig, cluster: ClusterConfig, refused: Counter[str]
) -> tuple[list[_Option], int]:
    """(the training layouts that fit, the number of settings evaluated)."""
    work = offline_work(config, model)
    trainer = config.trainer
    rates = Rates.of(cluster, trainer.n_gpus_per_node, config.actor.precision, trainer.device_peak_tflops)
    options = []
    for each in trainings(config, model, cluster, (), work, site_of(config, cluster), None, refused):
        chosen = replace(config, actor=each.of(config.actor))
        options.append(_Option(sum(offline_seconds(config, each.roles[0], rates).values()), each, chosen))
    return options, len(options) + sum(refused.values())


def _run_options(
    run: RunConfig, model: ModelConfig, cluster: ClusterConfig, others: Others, refused: Counter[str]
) -> tuple[list[_Option], int]:
    """(the fastest training layouts, each paired with rollout layouts; the number of settings evaluated)."""
    work, site = rl_work(run, run.actor.ppo_mini_batch_size, model), site_of(run, cluster)
    rates = Rates.of(cluster, site.per_node, run.actor.precision, run.trainer.device_peak_tflops)
    frozen = [role_plan(role, others.get(role.name, model), run, cluster) for role in run.group_rows if not role.trains]
    room = serving(
        model, run.rollout, device_bytes=site.device_bytes, processes=site.processes, lora=engine_lora(run, model)
    )
    output = partial(output_bytes, run, model, others)
    ours = [
        (_training_s(run, each.roles, rates), each)
        for each in trainings(run, model, cluster, frozen, work, site, room, refused, output)
    ]
    # An engine on several nodes waits for the network in every layer: only for a model that one node does not hold.
    choices = (list(_rollouts(run, model, cluster, refused, spans=spans)) for spans in (False, True))
    theirs = sorted(next(filter(None, choices), []), key=lambda each: each.seconds)
    considered = len(ours) + len(theirs) + sum(refused.values())
    fastest = sorted(ours, key=lambda each: each[0])[:PAIRED]
    return list(_pairs(run, cluster, fastest, theirs, refused)), considered


def _training_s(run: RunConfig, roles: Sequence[RolePlan], rates: Rates) -> float:
    sequences = run.data.train_batch_size * sequences_per_prompt(run)
    seconds = 0.0
    by_name = {role.name: role for role in roles}
    for stage in step_plan(run):
        if isinstance(stage, Pass):
            seconds += pass_s(by_name[stage.group], rates, sequences, train=False)
        elif isinstance(stage, Update):
            row = run.row(stage.role)
            trained = sequences * run.trained_config(row).ppo_epochs
            seconds += update_s(by_name[stage.role], rates, trained, updates_of(run, row))
    return seconds


def _rollouts(
    run: RunConfig, model: ModelConfig, cluster: ClusterConfig, refused: Counter[str], *, spans: bool
) -> Iterator[_Rollout]:
    """The rollout layouts whose cache has room for one sequence or more, with the seconds of generation.

    spans: only those whose engines are on several nodes; else only those whose engines are on one.
    """
    per_node = run.trainer.n_gpus_per_node
    device_bytes = int(cluster.gpu_memory_gib * GIB)
    separate = run.trainer.placement is Placement.separate
    world = run.rollout.layout.world_size if separate else run.trainer.world_size
    rates = Rates.of(cluster, per_node, run.rollout.dtype)
    prompt, response = mean_lengths(run.data)
    prompts = run.data.gen_batch_size or run.data.train_batch_size
    lora = engine_lora(run, model)
    shown = prompt_pictures(run, model).mean
    for tp in divisors(world):
        dp = world // tp
        for ep in sorted({1, tp, world}):
            for share in (SEPARATE_SHARE,) if separate else SHARES:
                config = replace(run.rollout, tp=tp, dp=dp, ep=ep, gpu_memory_utilization=share)
                if engine_place_violations(run.trainer, config.layout, per_node=per_node):
                    continue
                if (config.layout.engine_size > per_node) != spans:
                    refused["an engine would stand on several nodes"] += not spans
                    continue
                if rollout_violations(model, config.layout):
                    refused[f"vLLM cannot run the model with tp={tp}, ep={ep}"] += 1
                    continue
                if any(shard_violations(family_for(model), model, config)):
                    refused[f"the shards are not whole blocks with tp={tp}, ep={ep}"] += 1
                    continue
                room = serving(model, config, device_bytes=device_bytes, processes=ProcessMemory.of(cluster), lora=lora)
                if room.concurrency < 1:
                    refused[f"no room for the cache of one sequence, rollout tp={tp}"] += 1
                    continue
                asked = replace(config, n=config.n + 1) if run.needs_greedy else config
                seconds = sum(generation_s(model, asked, room, rates, prompts, prompt, response, shown))
                yield _Rollout(config, room, seconds)


def _pairs(
    run: RunConfig,
    cluster: ClusterConfig,
    training: Sequence[tuple[float, Training]],
    rollouts: Sequence[_Rollout],
    refused: Counter[str],
) -> Iterator[_Option]:
    """Pairs each training layout with every rollout layout, at the fastest memory share that leaves room for weights.

    training: (seconds, layout) of each.  rollouts: the fastest first.
    """
    rates = Rates.of(cluster, run.trainer.n_gpus_per_node, run.actor.precision)
    separate = run.trainer.placement is Placement.separate
    capacity = int(cluster.gpu_memory_gib * GIB)
    for seconds, ours in training:
        actor = ours.roles[0]
        weights = max(actor.state(stage).weights for stage in range(actor.layout.pp))
        processes = ProcessMemory.of(cluster).on_device(actor.layout.world_size, len(ours.roles))
        met: set[str] = set()
        for theirs in rollouts:
            layout = str(theirs.config.layout)
            if layout in met:
                continue
            if not separate and theirs.room.total + processes > capacity:
                refused["engine and the trainer's processes exceed a device"] += 1
                continue
            if not separate and theirs.room.awake + weights + 2 * UPDATE_BUCKET_BYTES + processes > capacity:
                refused["the weights of engine and actor exceed a device while they are sent"] += 1
                continue
            met.add(layout)
            sync = weights_s(actor, theirs.room.update_bytes, theirs.config.layout, rates, separate=separate)
            yield _Option(seconds + theirs.seconds + sync.total, ours, _with(run, ours, theirs.config))


def _with(run: RunConfig, ours: Training, rollout: RolloutConfig) -> RunConfig:
    groups = {role.name: ours.of(run.role_config(role)) for role in run.group_rows if role.trains}
    return replace(run.with_groups(groups), rollout=rollout)


def _reasons(planned: Plan, ours: Training, fastest: float) -> tuple[str, ...]:
    largest = max(planned.seconds, key=lambda part: planned.seconds[part])
    actor = ours.roles[0]
    layout = actor.layout
    reasons = [f"{planned.step_s / fastest:.2f} x the fastest" if planned.step_s > fastest else "the fastest"]
    reasons.append(f"{largest} takes {planned.seconds[largest] / planned.step_s:.0%}")
    if layout.pp > 1:
        count = max(1.0, actor.work.sequences * actor.work.mean / layout.dp / actor.tokens)
        reasons.append(f"bubble {(layout.pp - 1) / (count * layout.vpp):.0%}")
    update = planned.peak(Phase.update, Place.device)
    if update is not None and update.capacity:
        reasons.append(f"{(update.capacity - update.num_bytes) / GIB:.0f} GiB free in update")
    return tuple(reasons)


def _distance(run: RunConfig | OfflineConfig, other: RunConfig | OfflineConfig) -> float:
    """How much two runs differ: in doublings of sizes, with weights.

    A doubling of the training layout counts 2, of the rollout layout 1, of the microbatch a quarter, since that is the
    easiest to change.  Another recompute counts 1, a difference of the engines' shares counts four times its size.
    """
    ours = run.actor
    theirs = other.actor
    distance = 2 * sum(abs(log2(getattr(ours.parallel, axis) / getattr(theirs.parallel, axis))) for axis in AXES)
    distance += ours.recompute is not theirs.recompute
    tokens = (each.microbatch_tokens or LEAST_MICROBATCH for each in (ours, theirs))
    distance += abs(log2(next(tokens) / next(tokens))) / 4
    if not (isinstance(run, RunConfig) and isinstance(other, RunConfig)):
        return distance
    distance += sum(abs(log2(getattr(run.rollout, axis) / getattr(other.rollout, axis))) for axis in ROLLOUT_AXES)
    return distance + 4 * abs(run.rollout.gpu_memory_utilization - other.rollout.gpu_memory_utilization)
