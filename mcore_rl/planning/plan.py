"""Plans a run: what each device, node and disk must hold in each phase, whether it fits, and how long a step takes.

For reinforcement learning and for supervised fine-tuning.  Planning starts, reads and downloads nothing.

Weights, gradients and optimizer state are exact; all else is an estimate (docs/planning.md says how good).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from mcore_rl.config.algorithm_object import ACTOR, TEACHER
from mcore_rl.config.cluster import ClusterConfig, cluster_violations
from mcore_rl.config.engine import EngineConfig, SharePrompts, why_not_shared
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.model_violations import model_violations
from mcore_rl.config.offline import OfflineConfig
from mcore_rl.config.pairs import sequences_per_prompt, trains_pairs
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.config.placement import engine_nodes, engine_place_violations, with_replicas
from mcore_rl.config.role import Role
from mcore_rl.config.rollout import CPU_KV_CACHE_BYTES, Quantization, rollout_violations
from mcore_rl.config.router_replay import replay_model_violations
from mcore_rl.config.run import RunConfig
from mcore_rl.config.stages import Pass, Update
from mcore_rl.config.step_plan import step_plan
from mcore_rl.config.trainer import Placement, TrainerConfig
from mcore_rl.families.flops import patch_width
from mcore_rl.ground.errors import Violation, refuse_if_any
from mcore_rl.parallel.layout import layout_violations
from mcore_rl.planning.activations import engine_on, kernels_of
from mcore_rl.planning.distillation import hidden_bytes, num_teachers, output_bytes
from mcore_rl.planning.lengths import RowPictures, mean_lengths, row_pictures
from mcore_rl.planning.memory import Part, Site, checkpoint_bytes, peaks, route_bytes
from mcore_rl.planning.overheads import GIB, MEAN_RESPONSE_SHARE, SWITCH_S, ProcessMemory
from mcore_rl.planning.peaks import Peak, Phase, Place, Plan, Row, leaves_behind
from mcore_rl.planning.serving import Serving, serving
from mcore_rl.planning.states import family_for
from mcore_rl.planning.step_range import role_calibration
from mcore_rl.planning.timing import Rates, generation_s, move_s, offload_s, pass_s, update_s, weights_s
from mcore_rl.planning.training import RolePlan, Work, engine_lora
from mcore_rl.weights.quantised_shards import shard_violations, tensors_by_form

__all__ = ["Peak", "Phase", "Place", "Plan", "Row", "plan"]

SCORERS = {"reward_model": "reward model", "reward.judge.engines": "judge"}  # the names of their rows
KEYS = {
    Phase.rollout: "rollout.gpu_memory_utilization",
    Phase.sync: "rollout.gpu_memory_utilization",
    Phase.logprobs: "actor.parallel",
    Phase.update: "actor.parallel",
    Phase.save: "trainer.async_save",
}


def plan(
    run: RunConfig | OfflineConfig,
    model: ModelConfig,
    cluster: ClusterConfig,
    others: Mapping[str, ModelConfig] | None = None,
) -> Plan:
    """The plan of ``mcore-rl train`` or ``sft`` with the configuration ``run`` on ``cluster``.

    model: the policy's.  others: the models of roles that start from another checkpoint, by name of the role.
    Raises ConfigError if a layout does not divide the model or the world, so that there is nothing to plan.
    """
    if isinstance(run, OfflineConfig):
        return _plan_offline(run, model, cluster)
    return _plan_run(run, model, cluster, others or {})


def _plan_run(run: RunConfig, model: ModelConfig, cluster: ClusterConfig, others: Mapping[str, ModelConfig]) -> Plan:
    run = with_replicas(run, on_accelerators=cluster.gpus_per_node > 0)
    world = run.trainer.world_size
    refuse_if_any(_misfits(run, model, others, cluster))
    roles = [role_plan(role, others.get(role.name, model), run, cluster) for role in run.group_rows]
    site = site_of(run, cluster)
    device_bytes = site.device_bytes
    processes = site.processes
    per_node = site.per_node
    colocated = site.colocated
    room = serving(
        model,
        run.rollout,
        device_bytes=device_bytes,
        processes=processes,
        latent_attention=device_bytes is not None,
        lora=engine_lora(run, model),
    )
    engines = run.rollout.layout.world_size
    scorers = sum(each.layout.world_size for each in run.scorers.values())
    roles[0].teacher_output = output_bytes(run, model, others, roles[0].layout.tp)
    site = replace(
        site,
        engines_per_node=-(-engines // run.trainer.nnodes) if colocated else min(per_node, engines),
        ranks_per_engine=run.rollout.layout.engine_size,
        scorers=tuple(_scorers(run, device_bytes, processes)),
        routes=route_bytes(run, model, per_node),
        hidden=hidden_bytes(run, model, others, per_node),
        pictures=_picture_bytes(model, roles[0].work.pictures, run.data.train_batch_size),
    )
    run_peaks = [*peaks(roles, room, site), _disk(roles, run.trainer, model, exports=1 + (run.trainer.test_freq > 0))]
    behind = leaves_behind(run_peaks)
    seconds, tokens, between = _seconds(run, roles, room, cluster, per_node, behind=behind)
    configs = {role.name: run.role_config(role) for role in run.group_rows}
    narrow = [
        wrong for name, each in configs.items() for wrong in _too_narrow(each, run.data.max_response_length, name)
    ]
    notes = tuple(note for name, each in configs.items() for note in _notes(each, roles[0].work, name) if not narrow)
    if between:
        size = run.rollout.layout.engine_size
        nodes = engine_nodes(run.rollout.layout, per_node)
        spent = f"of the {seconds['generate']:.0f} s to generate, {between:.0f} go into reductions between them"
        notes += (f"an engine of {size} devices is on {nodes} nodes: {spent}",)
    gains, without = _sharing(run, roles, others, cluster)
    notes += without
    if colocated and device_bytes is not None and engines < world:
        notes += (_idle(run, seconds),)
    return Plan(
        title=run.recipe.title or run.trainer.experiment_name,
        layout=f"{run.actor.parallel}; rollout {run.rollout.layout}",
        num_nodes=run.trainer.nnodes + (0 if colocated else -(-(engines + scorers) // per_node)),
        num_gpus=world + (0 if colocated else engines + scorers),
        num_parameters=roles[0].sizes.num_parameters,
        peaks=_in_order(run_peaks),
        seconds=seconds,
        calibration=role_calibration(cluster, roles[0]),
        violations=[*narrow, *_too_large(run_peaks), *_no_cache(run, room, device_bytes)],
        concurrency=room.concurrency,
        tokens=tokens,
        notes=notes,
        gains=gains,
        form=_form(run, model),
    )


def _plan_offline(config: OfflineConfig, model: ModelConfig, cluster: ClusterConfig) -> Plan:
    config = replace(config, actor=engine_on(cluster, config.actor))
    trainer = config.trainer
    violations = [*model_violations(model), *_cluster_misfits(trainer, cluster)]
    violations += _layout_misfits(model, config.actor.parallel, trainer.world_size, "actor")
    refuse_if_any(violations)
    role = offline_role_plan(model, config, cluster)
    pictures = _picture_bytes(model, role.work.pictures, config.data.train_batch_size)
    site = replace(site_of(config, cluster), pictures=pictures)
    all_peaks = [*peaks([role], None, site), _disk([role], trainer, model, exports=1)]
    rates = Rates.of(cluster, trainer.n_gpus_per_node, config.actor.precision, trainer.device_peak_tflops)
    seconds = offline_seconds(config, role, rates)
    return Plan(
        title=config.recipe.title or trainer.experiment_name,
        layout=str(config.actor.parallel),
        num_nodes=trainer.nnodes,
        num_gpus=trainer.world_size,
        num_parameters=role.sizes.num_parameters,
        peaks=_in_order(all_peaks),
        seconds=seconds,
        calibration=role_calibration(cluster, role),
        violations=_too_large(all_peaks),
        tokens={"trained": role.work.sequences * role.work.mean},
        notes=_notes(config.actor, role.work, "actor"),
    )


def site_of(run: RunConfig | OfflineConfig, cluster: ClusterConfig) -> Site:
    """The machines of ``run`` on ``cluster``, without what engines and teachers need of them."""
    trainer = run.trainer
    return Site(
        device_bytes=int(cluster.gpu_memory_gib * GIB) if cluster.gpus_per_node else None,
        host_bytes=int(cluster.host_memory_gib * GIB),
        per_node=trainer.n_gpus_per_node,
        num_nodes=trainer.nnodes,
        colocated=isinstance(run, OfflineConfig) or trainer.placement is Placement.colocated,
        engines_per_node=0,
        saves=trainer.save_freq > 0 and trainer.async_save,
        processes=ProcessMemory.of(cluster),
    )


def updates_of(run: RunConfig, role: Role) -> int:
    """The optimizer steps of ``role`` in a step of the run."""
    config = run.trained_config(role)
    return config.ppo_epochs * max(1, run.data.train_batch_size // config.ppo_mini_batch_size)


def role_plan(role: Role, model: ModelConfig, run: RunConfig, cluster: ClusterConfig) -> RolePlan:
    """The plan of ``role``, whose first weights are ``model``'s, in the layout that ``run`` gives it."""
    config = engine_on(cluster, run.role_config(role))
    # A role that only scores processes all sequences of a step at once.
    mini = run.trained_config(role).ppo_mini_batch_size if role.trains else run.data.train_batch_size
    work = rl_work(run, mini, model)
    if _not_shared(role, model, run, cluster) is None:
        shared = max(0, round(mean_lengths(run.data)[0]) - 1)
        samples = sequences_per_prompt(run)
        if config.microbatch_tokens is not None:  # those of one microbatch share a prompt
            answer = max(1, round(sum(mean_lengths(run.data))) - shared)
            samples = min(samples, max(1, (config.microbatch_tokens - shared) // answer))
        work = replace(work, shared=shared, samples=samples)
    return RolePlan(
        role.name,
        model,
        config,
        config.parallel,
        run.trainer.world_size,
        work,
        accelerator=cluster.gpus_per_node > 0,
        head=role.head,
        trains=role.trains,
        publishes=role.publishes,
        frozen=run.snapshots_of(role.name),
        beside=num_teachers(run) - 1 if role.name == TEACHER else 0,
        with_full_kl=role.name == ACTOR and run.actor.with_full_kl,
    )


def _not_shared(role: Role, model: ModelConfig, run: RunConfig, cluster: ClusterConfig) -> str | None:
    """``why_not_shared`` of a role."""
    config = engine_on(cluster, run.role_config(role))
    if trains_pairs(run) and config.share_prompts is not SharePrompts.off:
        return "the two sequences of a pair stay together"
    kernels = kernels_of(model, config.parallel, config, accelerator=cluster.gpus_per_node > 0)
    return why_not_shared(config, model, config.parallel, transformer_engine=kernels.fused)


def _sharing(
    run: RunConfig, roles: Sequence[RolePlan], others: Mapping[str, ModelConfig], cluster: ClusterConfig
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(what sharing prompts saves, why roles that are to share them do not), each once for all roles."""
    by_reason: dict[str | None, list[RolePlan]] = {}
    for role, planned in zip(run.group_rows, roles, strict=True):
        if planned.engine.share_prompts is not SharePrompts.off:
            reason = _not_shared(role, others.get(role.name, roles[0].model), run, cluster)
            by_reason.setdefault(reason, []).append(planned)
    gains = list[str]()
    without = list[str]()
    for reason, those in by_reason.items():
        names = ", ".join(each.name for each in those)
        work = those[0].work
        if reason is None:
            saved = 1 - work.computed / work.mean
            gains.append(f"{names}: prompts computed once for {work.samples} samples save {saved:.0%} of the tokens")
        else:
            without.append(f"{names}: share_prompts=auto changes nothing, because {reason}")
    return tuple(gains), tuple(without)


def offline_role_plan(model: ModelConfig, config: OfflineConfig, cluster: ClusterConfig) -> RolePlan:
    """The plan of the model that a trainer without engines trains."""
    role = config.trained
    return RolePlan(
        role.name,
        model,
        config.actor,
        config.actor.parallel,
        config.trainer.world_size,
        offline_work(config, model),
        accelerator=cluster.gpus_per_node > 0,
        head=role.head,
        frozen=config.snapshots_of(role.name),
    )


def _scorers(run: RunConfig, device_bytes: int | None, processes: ProcessMemory) -> Iterator[Part]:
    """The shares of a device of engines that score; on the CPU, without weights, whose sizes are unknown here."""
    for key, each in run.scorers.items():
        ranks = each.layout.world_size
        cache = each.kv_cache_memory_bytes or CPU_KV_CACHE_BYTES
        on_cpu = processes.of_engines(ranks, each.tp) + ranks * cache
        share = on_cpu if device_bytes is None else int(each.gpu_memory_utilization * device_bytes)
        yield SCORERS[key], share, False


def offline_work(config: OfflineConfig, model: ModelConfig) -> Work:
    """The work of an optimizer step of a trainer without engines."""
    longest = config.longest_sequence
    sequences = config.data.train_batch_size * config.sequences_per_row
    mean = longest * MEAN_RESPONSE_SHARE
    together = config.sequences_per_row
    pictures = row_pictures(config.data, model, mean=mean, longest=longest)
    return Work(sequences=sequences, longest=longest, mean=mean, together=together, pictures=pictures)


def offline_seconds(config: OfflineConfig, role: RolePlan, rates: Rates) -> dict[str, float]:
    """Seconds of a step of a trainer without engines, by part."""
    sequences = role.work.sequences
    by_part = {config.trained.update_phase: update_s(role, rates, sequences, 1)}
    for frozen in config.snapshots_of(config.trained.name):
        by_part[frozen.phase] = pass_s(role, rates, sequences, train=False) + move_s(4 * role.heaviest.weights, rates)
    return by_part


def rl_work(run: RunConfig, mini: int, model: ModelConfig) -> Work:
    """The work of a role in an optimizer step of ``mini`` prompts."""
    prompt = run.data.max_prompt_length
    response = run.data.max_response_length
    mean = sum(mean_lengths(run.data))
    sequences = mini * sequences_per_prompt(run)
    together = 1 + trains_pairs(run)
    pictures = prompt_pictures(run, model)
    return Work(sequences=sequences, longest=prompt + response, mean=mean, together=together, pictures=pictures)


def prompt_pictures(run: RunConfig, model: ModelConfig) -> RowPictures:
    """The pictures of a prompt."""
    return row_pictures(run.data, model, mean=mean_lengths(run.data)[0], longest=run.data.max_prompt_length)


def _picture_bytes(model: ModelConfig, pictures: RowPictures, rows: int) -> int:
    """Bytes of the patches of the pictures of ``rows``, uint8, all of them rows that have most and no two alike."""
    if model.vision is None:
        return 0
    return patch_width(model.vision) * rows * sum(height * width for height, width in pictures.most)


def _seconds(
    run: RunConfig, roles: Sequence[RolePlan], room: Serving, cluster: ClusterConfig, per_node: int, *, behind: bool
) -> tuple[dict[str, float], dict[str, float], float]:
    """(seconds of a step by part, tokens of a step by kind, seconds that engines reduce between nodes).

    behind: see ``leaves_behind``.
    """
    actor = roles[0]
    rates = Rates.of(cluster, per_node, run.actor.precision, run.trainer.device_peak_tflops)
    prompts = run.data.train_batch_size
    n = run.rollout.n
    separate = run.trainer.placement is Placement.separate
    drawn = run.data.gen_batch_size or prompts
    prompt, response = mean_lengths(run.data)
    sequences = prompts * sequences_per_prompt(run)
    asked = replace(run.rollout, n=n + 1) if run.needs_greedy else run.rollout
    shown = actor.work.pictures.mean
    inside, between = generation_s(actor.model, asked, room, rates, drawn, prompt, response, shown)
    by_part = {"generate": inside + between}
    update = weights_s(actor, room.update_bytes, run.rollout.layout, rates, separate=separate)
    by_part["sync"] = update.total
    if not separate:
        by_part["sync"] += SWITCH_S if rates.accelerator else 0.0
        by_part["sync"] += sum(offload_s(role, rates, update.inside * (behind and role is actor)) for role in roles)
        if room.adapters and rates.accelerator:  # the engines keep their weights in host memory while they sleep
            by_part["sync"] += 2 * move_s(room.weights + room.adapters, rates)
    by_name = {role.name: role for role in roles}
    for stage in step_plan(run):
        if isinstance(stage, Pass):
            each = by_name[stage.group]
            swaps = each.beside if stage.weights is None else 1
            scored = pass_s(each, rates, sequences, train=False) + swaps * move_s(4 * each.heaviest.weights, rates)
            by_part[stage.phase] = by_part.get(stage.phase, 0.0) + scored
        elif isinstance(stage, Update):
            row = run.row(stage.role)
            epochs = run.trained_config(row).ppo_epochs
            by_part[stage.phase] = update_s(by_name[stage.role], rates, sequences * epochs, updates_of(run, row))
    if run.trainer.save_freq:
        saved = sum(checkpoint_bytes(role) for role in roles if role.trains)
        copied = saved / run.trainer.world_size
        written = saved / run.trainer.nnodes / (cluster.disk_gb_s * 1e9)
        by_part["save"] = (move_s(copied, rates) if run.trainer.async_save else written) / run.trainer.save_freq
    tokens = {"drawn": drawn * n * response, "trained": sequences * (prompt + response) * epochs}
    return by_part, tokens, between


def _in_order(unsorted: Sequence[Peak]) -> tuple[Peak, ...]:
    """The peaks in the order of the phases of a step."""
    phases = list(Phase)
    return tuple(sorted(unsorted, key=lambda peak: phases.index(peak.phase)))


def _disk(roles: Sequence[RolePlan], trainer: TrainerConfig, model: ModelConfig, *, exports: int) -> Peak:
    """The run directory at its largest: the checkpoints that are kept, the one being written, and ``exports``."""
    rows = []
    if trainer.save_freq:
        kept = trainer.max_to_keep
        if kept is None:
            steps = trainer.total_training_steps
            kept = max(1, steps // trainer.save_freq) if steps else 1
        for role in (each for each in roles if each.trains):
            num_bytes = checkpoint_bytes(role) * (kept + (trainer.max_to_keep is not None))
            rows.append((f"{role.name} checkpoints", num_bytes))
    size = roles[0].kernels.size * roles[0].sizes.num_parameters
    rows.append(("Hugging Face exports", exports * size))
    return Peak(
        phase=Phase.save,
        place=Place.disk,
        where="the run directory",
        rows=tuple(
            Row(phase=Phase.save, place=Place.disk, part=part, num_bytes=num_bytes, exact=True)
            for part, num_bytes in rows
        ),
        capacity=None,
    )


def _misfits(
    run: RunConfig, model: ModelConfig, others: Mapping[str, ModelConfig], cluster: ClusterConfig
) -> list[Violation]:
    world = run.trainer.world_size
    violations = [*model_violations(model), *_cluster_misfits(run.trainer, cluster)]
    violations += rollout_violations(model, run.rollout.layout)
    if not violations:
        violations += shard_violations(family_for(model), model, run.rollout)
    violations += replay_model_violations(run, model, None)
    for role in run.group_rows:
        parallel = run.role_config(role).parallel
        violations += _layout_misfits(others.get(role.name, model), parallel, world, role.name)
    if cluster.gpus_per_node:
        violations += engine_place_violations(run.trainer, run.rollout.layout, per_node=cluster.gpus_per_node)
    return violations


def _layout_misfits(model: ModelConfig, parallel: ParallelConfig, world: int, role: str) -> list[Violation]:
    return [
        replace(each, key=f"{role}.parallel.{each.key.removeprefix('parallel.')}")
        for each in layout_violations(model, parallel, world)
    ]


def _cluster_misfits(trainer: TrainerConfig, cluster: ClusterConfig) -> list[Violation]:
    violations = cluster_violations(cluster)
    there = cluster.gpus_per_node
    if there and trainer.n_gpus_per_node > there:
        problem = f"a node of {cluster.name or 'the cluster'} has {there}"
        violations.append(
            Violation("trainer.n_gpus_per_node", trainer.n_gpus_per_node, problem, f"Write {there} or less")
        )
    return violations


def _too_large(all_peaks: Sequence[Peak]) -> list[Violation]:
    """A violation for each peak above capacity, with its largest parts."""
    return [
        Violation(
            KEYS[peak.phase],
            peak.where,
            f"{peak.phase.value} needs {_gib(peak.num_bytes)} of {_gib(peak.capacity or 0)} GiB "
            f"({peak.place.value}): {_largest(peak)}",
            _REMEDIES[peak.phase, peak.place],
        )
        for peak in all_peaks
        if not peak.fits
    ]


_FEWER = "Split the model further (tp, pp, ep), recompute more, or lower microbatch_tokens"
_REMEDIES = {
    (Phase.update, Place.device): _FEWER,
    (Phase.logprobs, Place.device): _FEWER,
    (Phase.rollout, Place.device): "Lower rollout.gpu_memory_utilization or raise rollout.tp",
    (Phase.sync, Place.device): "Lower rollout.gpu_memory_utilization, or split the actor further",
    (Phase.update, Place.host): "Take more nodes, or nodes with more memory",
    (Phase.rollout, Place.host): "Take more nodes, or nodes with more memory, or trainer.placement=separate",
    (Phase.save, Place.host): "Write trainer.async_save=false or trainer.placement=separate, or take more nodes",
}


def _no_cache(run: RunConfig, room: Serving, device_bytes: int | None) -> list[Violation]:
    if device_bytes is None or room.concurrency >= 1:
        return []
    fixed = room.weights + room.working + room.overhead
    problem = (
        f"an engine may take {_gib(room.budget)} GiB of a device, weights and working memory take {_gib(fixed)}, and "
        f"one sequence of {run.rollout.max_model_len} tokens {_gib(room.per_sequence)}"
    )
    remedy = "Raise it, or rollout.tp, or shorten the sequences"
    return [Violation("rollout.gpu_memory_utilization", run.rollout.gpu_memory_utilization, problem, remedy)]


def _largest(peak: Peak, count: int = 4) -> str:
    rows = sorted(peak.rows, key=lambda row: -row.num_bytes)[:count]
    return ", ".join(f"{row.part} {_gib(row.num_bytes)}" for row in rows)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f}"


def _idle(run: RunConfig, seconds: Mapping[str, float]) -> str:
    """What is said of a run whose colocated engines are on some of its devices only."""
    world = run.trainer.world_size
    share = seconds["generate"] / sum(seconds.values())
    unset = replace(run, rollout=replace(run.rollout, dp=None))
    more = with_replicas(unset, on_accelerators=True).rollout.dp
    remedy = f": rollout.dp={more} takes more" if more != run.rollout.dp else ""
    return f"{world - run.rollout.layout.world_size} of {world} GPUs idle in {share:.0%} of a step, in generate{remedy}"


def _notes(engine: EngineConfig, work: Work, role: str) -> tuple[str, ...]:
    longest = work.longest * work.together
    what = "pairs" if work.together > 1 else "sequences"
    if engine.microbatch_tokens is not None and longest > engine.microbatch_tokens:
        return (
            f"the longest {what}, of {longest} tokens, do not fit {role}.microbatch_tokens="
            f"{engine.microbatch_tokens}: a run whose data allow for one is refused before it starts",
        )
    return ()


def _form(run: RunConfig, model: ModelConfig) -> str:
    quantization = run.rollout.quantization
    if quantization is Quantization.none:
        return ""
    quantised, plain = tensors_by_form(family_for(model), model)
    return f"engines hold {', '.join(quantised)} in {quantization.value}; {', '.join(plain)} stay plain"


def _too_narrow(engine: EngineConfig, longest_response: int, role: str) -> list[Violation]:
    """A microbatch that the longest response does not fit into, whatever its prompt."""
    tokens = engine.microbatch_tokens
    if tokens is None or longest_response < tokens:
        return []
    problem = f"the longest response, of {longest_response} tokens, does not fit into a microbatch with its prompt"
    remedy = f"Write more than {longest_response}, or a shorter data.max_response_length"
    return [Violation(f"{role}.microbatch_tokens", tokens, problem, remedy)]
