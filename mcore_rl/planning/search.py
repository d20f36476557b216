"""The layouts of a run that fit a cluster, fastest first, and what was refused and why.

Training and rollout share devices and meet in two numbers only: what is on a device while weights are sent, and how
long that takes.  So layouts of each are judged by themselves, with the code that plans a run, and the fastest are
paired; the best of each layout pair are planned whole before they are named.  A critic has the actor's layout.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd, log2

from mcore_rl.config.cluster import ClusterConfig
from mcore_rl.config.engine import Recompute
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.parallel import AXES, ParallelConfig
from mcore_rl.config.placement import engine_place_violations
from mcore_rl.config.rollout import ROLLOUT_AXES, RolloutConfig, rollout_violations
from mcore_rl.config.run import RunConfig
from mcore_rl.config.sft import SftConfig
from mcore_rl.config.trainer import Placement
from mcore_rl.errors import ConfigError
from mcore_rl.parallel.layout import Layout, balanced_layers, divisor_limits, divisors
from mcore_rl.planning.memory import BUCKET_BYTES, Site, peaks, process_bytes
from mcore_rl.planning.overheads import GIB, MEAN_PROMPT_SHARE, MEAN_RESPONSE_SHARE
from mcore_rl.planning.peaks import Phase, Place, Plan
from mcore_rl.planning.plan import plan, rl_work
from mcore_rl.planning.serving import Serving, serving
from mcore_rl.planning.states import ModelSizes, States
from mcore_rl.planning.timing import Rates, generate_s, score_s, update_s, weights_s
from mcore_rl.planning.training import Role

MAX_VPP = 4
MAX_CP = 16
SHORTEST_CP = 4096  # tokens of a sequence that a context rank must have at least, for its work to hide the exchange
MAX_EP_NODES = 4  # nodes that the experts of a layer may be spread over
SHARES = (0.4, 0.5, 0.6, 0.7, 0.8, 0.85)  # of a device, for the engine
SEPARATE_SHARE = 0.9
MICROBATCH_FACTORS = (1, 2, 4)  # times the longest sequence
LEAST_MICROBATCH = 4096  # tokens, where sequences are short
PAIRED = 200  # of the fastest training layouts


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A run that fits.  overrides: what to write.  reasons: for people, why it stands where it stands."""

    run: RunConfig
    plan: Plan
    overrides: tuple[str, ...]
    reasons: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Found:
    """best: fastest first.  refused: how many, by why.  considered: settings looked at."""

    best: tuple[Candidate, ...]
    refused: dict[str, int]
    considered: int
    seconds: float


@dataclass(frozen=True)
class _Training:
    parallel: ParallelConfig
    recompute: Recompute
    tokens: int
    seconds: float
    actor: Role


@dataclass(frozen=True)
class _Rollout:
    config: RolloutConfig
    room: Serving
    seconds: float


def search(run: RunConfig, model: ModelConfig, cluster: ClusterConfig, *, limit: int = 10) -> Found:
    """The ``limit`` fastest layouts of ``run`` on ``trainer.nnodes`` nodes of ``cluster``, of accelerators.

    Only layouts, microbatches, recompute and the engine's share change; what is learned does not.
    """
    assert cluster.gpus_per_node > 0, "layouts are searched for accelerators"
    begin = time.perf_counter()
    refused: Counter[str] = Counter()
    training = sorted(_trainings(run, model, cluster, refused), key=lambda each: each.seconds)
    rollouts = sorted(_rollouts(run, model, cluster, refused), key=lambda each: each.seconds)
    considered = len(training) + len(rollouts) + sum(refused.values())
    pairs = _pairs(run, model, cluster, training[:PAIRED], rollouts, refused)
    best: dict[str, tuple[float, _Training, _Rollout]] = {}
    for seconds, ours, theirs in sorted(pairs, key=lambda each: each[0]):
        best.setdefault(str(ours.parallel), (seconds, ours, theirs))
    found: list[Candidate] = []
    for _, ours, theirs in best.values():
        if len(found) == limit:
            break
        chosen = _with(run, ours, theirs)
        planned = plan(chosen, model, cluster)
        if planned.fits:
            fastest = found[0].plan.step_s if found else planned.step_s
            found.append(
                Candidate(
                    run=chosen, plan=planned, overrides=overrides_of(chosen), reasons=_reasons(planned, ours, fastest)
                )
            )
        else:
            refused[f"does not fit whole: {planned.violations[0].problem.split(' needs ')[0]}"] += 1
    found.sort(key=lambda each: each.plan.step_s)
    return Found(
        best=tuple(found), refused=dict(refused), considered=considered, seconds=time.perf_counter() - begin
    )  # fmt: skip


def nearest_that_fit(run: RunConfig, model: ModelConfig, cluster: ClusterConfig, *, count: int = 3) -> list[Candidate]:
    """Of all that fit, those least unlike ``run``."""
    found = search(run, model, cluster, limit=60).best
    return sorted(found, key=lambda each: (_distance(run, each.run), each.plan.step_s))[:count]


def refusal(planned: Plan, run: RunConfig | SftConfig, model: ModelConfig, cluster: ClusterConfig) -> ConfigError:
    """What is told of a run that does not fit: every violation, the last with the nearest settings that do."""
    assert planned.violations, "a run that fits is not refused"
    found = list(planned.violations)
    if isinstance(run, RunConfig) and cluster.gpus_per_node:
        near = nearest_that_fit(run, model, cluster)
        texts = "; ".join(" ".join(_changes(run, each.run)) for each in near)
        nodes = f"{run.trainer.nnodes} x {run.trainer.n_gpus_per_node} devices of {cluster.name or 'this cluster'}"
        hint = f"Nearest settings that fit: {texts}" if near else f"No layout fits {nodes}: take more nodes"
        found[-1] = replace(found[-1], remedy=f"{found[-1].remedy}. {hint}")
    return ConfigError(found)


def _changes(run: RunConfig, other: RunConfig) -> list[str]:
    """The overrides that make ``run`` the ``other``."""
    before = set(overrides_of(run))
    return [each for each in overrides_of(other) if each not in before]


def overrides_of(run: RunConfig) -> tuple[str, ...]:
    """What to write for the layouts of ``run``."""
    layout, rollout = run.actor.parallel, run.rollout
    found = [f"actor.parallel.{axis}={getattr(layout, axis)}" for axis in AXES]
    if layout.pipeline_layers is not None:
        found.append(f"actor.parallel.pipeline_layers=[{','.join(map(str, layout.pipeline_layers))}]")
    if run.needs_critic:
        found += [each.replace("actor.", "critic.", 1) for each in list(found)]
    found += [f"actor.recompute={run.actor.recompute.value}", f"actor.microbatch_tokens={run.actor.microbatch_tokens}"]
    if run.needs_critic:
        found += [each.replace("actor.", "critic.", 1) for each in found[-2:]]
    found += [f"rollout.{axis}={getattr(rollout, axis)}" for axis in ROLLOUT_AXES]
    return (*found, f"rollout.gpu_memory_utilization={rollout.gpu_memory_utilization:g}")


def layouts(model: ModelConfig, world_size: int, per_node: int, longest: int) -> Iterator[ParallelConfig]:
    """Layouts worth a look: tp inside a node, etp 1 or tp, experts over few nodes, cp for long sequences."""
    limits = {axis: gcd(*by_key.values()) for axis, by_key in divisor_limits(model).items()}
    for pp in (size for size in divisors(world_size) if size <= model.num_layers):
        stage = world_size // pp
        for tp in (size for size in divisors(gcd(stage, limits["tp"])) if size <= per_node):
            for cp in (size for size in divisors(stage // tp) if size <= MAX_CP):
                if cp > 1 and longest < SHORTEST_CP * cp:
                    continue
                for etp in {1, tp} if model.moe is not None and limits["etp"] % tp == 0 else {1}:
                    eps = divisors(gcd(stage // etp, limits["ep"])) if stage % etp == 0 else []
                    for ep in eps:
                        if ep * etp <= MAX_EP_NODES * per_node:
                            yield from _placed(model, ParallelConfig(tp=tp, pp=pp, cp=cp, ep=ep, etp=etp))


def _placed(model: ModelConfig, layout: ParallelConfig) -> Iterator[ParallelConfig]:
    """With every number of chunks a stage; layers are balanced where they do not divide."""
    for vpp in range(1, MAX_VPP + 1 if layout.pp > 1 else 2):
        chunks = layout.pp * vpp
        if chunks > model.num_layers or (vpp > 1 and model.num_layers % chunks):
            continue
        uneven = balanced_layers(model.num_layers, chunks) if model.num_layers % chunks else None
        yield replace(layout, vpp=vpp, pipeline_layers=uneven)


def _trainings(
    run: RunConfig, model: ModelConfig, cluster: ClusterConfig, refused: Counter[str]
) -> Iterator[_Training]:
    """Those that fit while they train, with the seconds of log-probs and updates."""
    world, per_node = run.trainer.world_size, run.trainer.n_gpus_per_node
    work, site = rl_work(run, run.actor.ppo_mini_batch_size), _site(run, cluster)
    rates = Rates.of(cluster, per_node, run.actor.precision, run.trainer.device_peak_tflops)
    names = ["actor", "critic"] if run.needs_critic else ["actor"]
    sizes = {name: ModelSizes(model, critic=name == "critic") for name in names}
    room = serving(model, run.rollout, device_bytes=site.device_bytes)
    capacity = site.device_bytes or 0
    for parallel in layouts(model, world, per_node, work.longest):
        layout = Layout.of(parallel, world)
        if work.sequences < layout.dp:
            refused[f"fewer than one sequence for each of dp={layout.dp} ranks in a minibatch"] += 1
            continue
        states = {name: States(sizes[name], parallel, world, run.actor.precision) for name in names}
        floor = max(sum(each.of_stage(stage).total for each in states.values()) for stage in range(layout.pp))
        if floor > capacity:
            refused["weights, gradients and optimizer alone exceed a device"] += 1
            continue
        for tokens in microbatches(work.longest, work.sequences // layout.dp * work.longest, layout.cp):
            for recompute in Recompute:
                roles = [
                    Role(name, model, replace(run.actor if name == "actor" else run.critic, recompute=recompute,
                         microbatch_tokens=tokens, microbatch_sequences=None), parallel, world,
                         work, accelerator=True, states=states[name])
                    for name in names
                ]  # fmt: skip
                if layout.vpp > 1 and roles[0].num_microbatches < 2 * layout.pp:
                    refused["too few microbatches for an interleaved schedule"] += 1
                    continue
                if not all(peak.fits for peak in peaks(roles, room, site) if peak.phase is Phase.update):
                    refused[f"update exceeds a device, recompute={recompute.value}"] += 1
                    continue
                yield _Training(parallel, recompute, tokens, _training_s(run, roles, rates), roles[0])
                break  # more recompute is slower


def microbatches(longest: int, most: int, cp: int) -> list[int]:
    """Tokens worth a look: the longest sequence and a few times that, as far as a minibatch has so many."""
    least = max(-(-longest // 1024) * 1024, LEAST_MICROBATCH * cp)
    return sorted({min(least * factor, max(least, -(-most // 1024) * 1024)) for factor in MICROBATCH_FACTORS})


def _training_s(run: RunConfig, roles: Sequence[Role], rates: Rates) -> float:
    sequences, seconds = run.data.train_batch_size * run.rollout.n, 0.0
    for role in roles:
        config = run.actor if role.name == "actor" else run.critic
        updates = config.ppo_epochs * max(1, run.data.train_batch_size // config.ppo_mini_batch_size)
        scored = 1 + (role.name == "actor" and run.needs_reference)
        seconds += scored * score_s(role, rates, sequences)
        seconds += update_s(role, rates, sequences * config.ppo_epochs, updates)
    return seconds


def _rollouts(run: RunConfig, model: ModelConfig, cluster: ClusterConfig, refused: Counter[str]) -> Iterator[_Rollout]:
    """Those that have room for a sequence and more, with the seconds of generation."""
    per_node, device_bytes = run.trainer.n_gpus_per_node, int(cluster.gpu_memory_gib * GIB)
    separate = run.trainer.placement is Placement.separate
    world = run.rollout.layout.world_size if separate else run.trainer.world_size
    rates = Rates.of(cluster, per_node, run.rollout.dtype)
    prompt, response = (
        MEAN_PROMPT_SHARE * run.data.max_prompt_length,
        MEAN_RESPONSE_SHARE * run.data.max_response_length,
    )
    prompts = run.data.gen_batch_size or run.data.train_batch_size
    for tp in (size for size in divisors(world) if size <= per_node and per_node % size == 0):
        dp = world // tp
        for ep in sorted({1, tp, world}):
            for share in (SEPARATE_SHARE,) if separate else SHARES:
                config = replace(run.rollout, tp=tp, dp=dp, ep=ep, gpu_memory_utilization=share)
                if rollout_violations(model, config.layout):
                    refused[f"vLLM cannot run the model with tp={tp}, ep={ep}"] += 1
                    continue
                if engine_place_violations(run.trainer, config.layout):
                    refused["an engine would stand on several nodes"] += 1
                    continue
                room = serving(model, config, device_bytes=device_bytes)
                if room.concurrency < 1:
                    refused[f"no room for the cache of one sequence, rollout tp={tp}"] += 1
                    continue
                asked = replace(config, n=config.n + 1) if run.needs_greedy else config
                yield _Rollout(config, room, generate_s(model, asked, room, rates, prompts, prompt, response))


def _pairs(
    run: RunConfig, model: ModelConfig, cluster: ClusterConfig, training: Sequence[_Training],
    rollouts: Sequence[_Rollout], refused: Counter[str],
) -> Iterator[tuple[float, _Training, _Rollout]]:  # fmt: skip
    """Each of ``training`` with every rollout layout's fastest share that leaves room for the actor's weights."""
    rates = Rates.of(cluster, run.trainer.n_gpus_per_node, run.actor.precision)
    separate = run.trainer.placement is Placement.separate
    capacity = int(cluster.gpu_memory_gib * GIB)
    num_roles = 2 if run.needs_critic else 1
    for ours in training:
        weights = max(ours.actor.state(stage).weights for stage in range(ours.actor.layout.pp))
        beside = weights + 2 * BUCKET_BYTES + process_bytes(ours.actor.layout.world_size, num_roles)
        met: set[str] = set()
        for theirs in rollouts:
            layout = str(theirs.config.layout)
            if layout in met:
                continue
            if not separate and theirs.room.total + beside > capacity:
                refused["engine and the actor's weights exceed a device while weights are sent"] += 1
                continue
            met.add(layout)
            sync = weights_s(ours.actor, theirs.room.weights, rates, separate=separate, single=False)
            yield ours.seconds + theirs.seconds + sync, ours, theirs


def _site(run: RunConfig, cluster: ClusterConfig) -> Site:
    return Site(
        device_bytes=int(cluster.gpu_memory_gib * GIB),
        host_bytes=int(cluster.host_memory_gib * GIB),
        per_node=run.trainer.n_gpus_per_node,
        num_nodes=run.trainer.nnodes,
        colocated=run.trainer.placement is Placement.colocated,
        engines_per_node=0,
        snapshot=run.needs_reference,
        saves=False,
    )


def _with(run: RunConfig, ours: _Training, theirs: _Rollout) -> RunConfig:
    changes = dict(
        parallel=ours.parallel, recompute=ours.recompute, microbatch_tokens=ours.tokens, microbatch_sequences=None
    )
    return replace(
        run,
        actor=replace(run.actor, **changes),  # type: ignore[arg-type]
        critic=replace(run.critic, **changes) if run.needs_critic else run.critic,  # type: ignore[arg-type]
        rollout=theirs.config,
    )


def _reasons(planned: Plan, ours: _Training, fastest: float) -> tuple[str, ...]:
    largest = max(planned.seconds, key=lambda part: planned.seconds[part])
    layout = ours.actor.layout
    found = [f"{planned.step_s / fastest:.2f} x the fastest" if planned.step_s > fastest else "the fastest"]
    found.append(f"{largest} takes {planned.seconds[largest] / planned.step_s:.0%}")
    if layout.pp > 1:
        work = ours.actor.work
        count = max(1.0, work.sequences * work.mean / layout.dp / ours.actor.tokens)
        found.append(f"bubble {(layout.pp - 1) / (count * layout.vpp):.0%}")
    update = planned.peak(Phase.update, Place.device)
    if update is not None and update.capacity:
        found.append(f"{(update.capacity - update.num_bytes) / GIB:.0f} GiB free in update")
    return tuple(found)


def _distance(run: RunConfig, other: RunConfig) -> float:
    """Doublings of the training layout count twice, those of a microbatch a quarter: it is the easiest to change."""
    ours, theirs = run.actor, other.actor
    found = 2 * sum(abs(log2(getattr(ours.parallel, axis) / getattr(theirs.parallel, axis))) for axis in AXES)
    found += ours.recompute is not theirs.recompute
    tokens = (each.microbatch_tokens or LEAST_MICROBATCH for each in (ours, theirs))
    found += abs(log2(next(tokens) / next(tokens))) / 4
    found += sum(abs(log2(getattr(run.rollout, axis) / getattr(other.rollout, axis))) for axis in ROLLOUT_AXES)
    return found + 4 * abs(run.rollout.gpu_memory_utilization - other.rollout.gpu_memory_utilization)


def reasons_by_count(refused: dict[str, int]) -> Iterable[tuple[str, int]]:
    """Most first."""
    return sorted(refused.items(), key=lambda each: -each[1])
