"""The memory of a run by phase and place: what trainer and engines have on the device and on the host in each phase.

Colocated on accelerators (controller/lifecycle/device_sharing.py): while the engines generate, the trainer's state is
in pinned host memory, one block a part (what it takes: parallel/pinned_size.py), and never freed; while weights are
sent, the actor's are on the device beside the awake engine; while roles are trained, they are on the device and the
engines sleep.  On the CPU, device and host are one memory, and engines do not sleep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from mcore_rl.config.engine import Precision
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.pairs import sequences_per_prompt
from mcore_rl.config.roles import RouterReplay
from mcore_rl.config.rollout import UPDATE_BUCKET_BYTES
from mcore_rl.config.run import RunConfig
from mcore_rl.parallel.layout import Layout
from mcore_rl.planning.overheads import (
    CPU_CONTROLLER_BYTES,
    CPU_PROCESS_BYTES,
    FRAGMENTATION,
    HEAP_BYTES_PER_PARAMETER,
    HEAP_LIMIT_BYTES,
    HEAP_SHARE,
    SLEEPING_ENGINE_BYTES,
    ProcessMemory,
)
from mcore_rl.planning.peaks import LEAVING, Peak, Phase, Place, Row
from mcore_rl.planning.serving import Serving
from mcore_rl.planning.states import MAIN_BYTES, MOMENT_BYTES, StateBytes
from mcore_rl.planning.training import RolePlan, StepBytes

Part = tuple[str, int, bool]  # (name, bytes, whether they are exact)
AWAKE_AT_UPDATES = ("engine weights", "engine adapters", "engine graphs and overhead")


@dataclass(frozen=True, kw_only=True)
class Site:
    """The machines of a run, and what shares them.

    device_bytes: memory of one accelerator; None on the CPU.
    host_bytes: memory of one node.
    per_node, num_nodes: training ranks per node, and nodes.
    colocated: whether the engines share the trainer's devices.
    engines_per_node: rollout ranks per node.
    saves: whether checkpoints are written while the run goes on.
    processes: what processes take beside tensors.
    ranks_per_engine: rollout ranks of one engine.
    scorers: what engines that score may use of a device (on the CPU: of the machine).
    routes: of experts that updates repeat, on the node that has most; 0 without ``actor.router_replay``.
    hidden: of a teacher's hidden states, on the node that has most; 0 unless it is in the loss.
    pictures: patches of a step's different pictures, which a node's store has once; 0 where models are given none.
    """

    device_bytes: int | None
    host_bytes: int
    per_node: int
    num_nodes: int
    colocated: bool
    engines_per_node: int
    saves: bool
    processes: ProcessMemory
    ranks_per_engine: int = 1
    scorers: tuple[Part, ...] = ()
    routes: int = 0
    hidden: int = 0
    pictures: int = 0

    @property
    def shared_parts(self) -> list[Part]:
        """``routes``, ``hidden`` and ``pictures`` as rows of the host's memory, where there are any."""
        parts = [
            ("experts to repeat", self.routes, False),
            ("teacher hidden states", self.hidden, False),
            ("pictures", self.pictures, False),
        ]
        return [part for part in parts if part[1]]


def route_bytes(run: RunConfig, model: ModelConfig, per_node: int) -> int:
    """Host memory of a step's ``routing_TLK`` on the node that has most, all sequences as long as they may be.

    Every process has those of its data-parallel coordinate, and the nodes' stores have all of them once.  With ``r3``
    the controller has them twice, of episodes and assembled, and its node's store once, before they are spread.
    """
    mode = run.actor.router_replay
    if mode is RouterReplay.off or model.moe is None:
        return 0
    sequences = run.data.train_batch_size * max(run.rollout.n, sequences_per_prompt(run))
    of_step = sequences * run.rollout.max_model_len * model.num_layers * model.moe.top_k * model.moe.choice_bytes
    dp = Layout.of(run.actor.parallel, run.trainer.world_size).dp
    copies = 3 if mode is RouterReplay.r3 else 1 / run.trainer.nnodes
    return ceil(of_step * (per_node / dp + copies))


def peaks(roles: Sequence[RolePlan], room: Serving | None, site: Site) -> Iterator[Peak]:
    """The peak of every phase and place except the disk.  room: the memory of a rollout rank; None without rollout."""
    if site.device_bytes is None:
        yield from _on_cpu(roles, room, site)
        return
    training = [*_training(roles, room, site)]
    yield from training
    if room is not None:
        rollout = _rollout(roles, room, site)
        yield rollout
        yield _sync(roles, room, site, highest=max(peak.num_bytes for peak in (*training, rollout)))
    yield from _host(roles, room, site)


def state_parts(role: RolePlan, stage: int) -> list[Part]:
    """The lasting memory of ``role``, on the rank of ``stage`` that has most: weights, and if trained, the rest."""
    state = role.state(stage)
    parts: list[Part] = [(f"{role.name} weights", state.weights, True)]
    if role.trains:
        parts += [(f"{role.name} gradients", state.gradients, True), (f"{role.name} optimizer", state.optimizer, True)]
    return parts


def step_parts(role: RolePlan, step: StepBytes, stage: int) -> list[Part]:
    """The temporary memory of a pass of ``role`` at ``stage``, and what the allocator loses."""
    lost = FRAGMENTATION * step.total if role.accelerator else heap_bytes(role, step, stage)
    return [
        ("activations", step.activations, False),
        ("logits", step.logits, False),
        ("working memory", step.working, False),
        ("teacher output and logits", step.teacher, False),
        ("gradient of the exact KL", step.full_kl, False),
        ("allocator", round(lost), False),
    ]


def heap_bytes(role: RolePlan, step: StepBytes, stage: int) -> float:
    """Memory that a process on the CPU has freed but glibc does not return to the system; see ``overheads.py``."""
    size = role.kernels.size
    total = 0.0
    for buckets in role.states.buckets(stage):
        for bucket in buckets:
            small = sum(n * repeats for numels, repeats in bucket.runs for n in numels if n * size < HEAP_LIMIT_BYTES)
            total += HEAP_BYTES_PER_PARAMETER * small
    if role.rows * role.model.hidden_size * size < HEAP_LIMIT_BYTES:
        total += HEAP_SHARE * (step.activations + step.working)
    return total


def process_peak(role: RolePlan, stage: int) -> int:
    """The peak of one training process on the CPU, outside of Ray: what benchmarks/plan.py measures."""
    parts = [*state_parts(role, stage), *step_parts(role, role.training(stage), stage)]
    return CPU_PROCESS_BYTES + sum(num_bytes for _, num_bytes, _ in parts)


def checkpoint_bytes(role: RolePlan) -> int:
    """The bytes of a checkpoint of ``role``, over all ranks; every trained element is saved once."""
    layout = role.layout
    held = 0
    for stage in range(layout.pp):
        dense, experts = role.states.trained.buckets(stage)
        held += layout.tp * sum(bucket.held for bucket in dense)
        held += layout.etp * layout.ep * sum(bucket.held for bucket in experts)
    return held * role.saved_bytes


def _peak(phase: Phase, place: Place, where: str, parts: Iterable[Part], capacity: int | None) -> Peak:
    rows = tuple(
        Row(phase=phase, place=place, part=part, num_bytes=num_bytes, exact=exact)
        for part, num_bytes, exact in parts
        if num_bytes
    )
    return Peak(phase=phase, place=place, where=where, rows=rows, capacity=capacity)


def _stages(roles: Sequence[RolePlan]) -> list[tuple[int, ...]]:
    """The combinations of the roles' stages that share a device, each once."""
    world = roles[0].layout.world_size
    per_stage = [world // role.layout.pp for role in roles]
    return sorted({tuple(rank // each for each in per_stage) for rank in range(0, world, min(per_stage))})


def _where(role: RolePlan, stage: int) -> str:
    layout = role.layout
    rank = layout.rank_of(tp=0, cp=0, dp=0, pp=stage)
    return f"rank {rank}, stage {stage + 1} of {layout.pp}" if layout.pp > 1 else f"rank {rank}"


def _on_device(role: RolePlan, stage: int, phase: Phase, at_work: RolePlan, colocated: bool) -> list[Part]:
    """The lasting memory of ``role`` on the device while ``at_work`` scores or trains.

    Roles on devices of their own stay complete.  Colocated roles load only what they need: weights to score, everything
    to train.  The policy trains last, when the others are offloaded; a frozen role offloads after it has scored
    (``TrainWorker.rest``).
    """
    parts = state_parts(role, stage)
    if not colocated or (phase is Phase.update and role is at_work):
        return parts
    if phase is Phase.update and at_work.publishes:
        return []
    if not role.trains and role is not at_work:
        return []
    return parts[:1]


def _training(roles: Sequence[RolePlan], room: Serving | None, site: Site) -> Iterator[Peak]:
    asleep = 0
    if room is not None and site.colocated:
        asleep = SLEEPING_ENGINE_BYTES * (1 + len(site.scorers))
    fixed: list[Part] = [
        _on_device_by_processes("processes", roles, site),
        ("engines asleep", asleep, False),
    ]
    for phase in (Phase.logprobs, Phase.update) if room is not None else (Phase.update,):
        candidates = []
        for stages in _stages(roles):
            for role, stage in zip(roles, stages, strict=True):
                if phase is Phase.update and not role.trains:
                    continue
                step = role.training(stage) if phase is Phase.update else role.scoring(stage)
                where = f"{role.name}, {_where(role, stage)}"
                states = [
                    part
                    for each, other in zip(roles, stages, strict=True)
                    for part in _on_device(each, other, phase, role, site.colocated)
                ]
                parts = [*states, *step_parts(role, step, stage), *fixed]
                candidates.append(_peak(phase, Place.device, where, parts, site.device_bytes))
        yield max(candidates, key=lambda peak: peak.num_bytes)


def _awake(room: Serving, site: Site) -> list[Part]:
    """The memory of a rollout rank that is awake; colocated, all of its share of the device."""
    left = max(0, room.budget - room.weights - room.adapters - room.working - room.overhead - max(0, room.cache))
    return [
        ("engine weights", room.weights, True),
        ("engine adapters", room.adapters, True),
        ("cache of keys and values", max(0, room.cache), False),
        ("engine working memory", room.working, False),
        ("engine, vision tower at work", room.encoder, False),
        ("engine graphs and overhead", room.overhead, False),
        ("engine, not used", left if site.colocated else 0, False),
    ]


def _trainers(roles: Sequence[RolePlan], site: Site) -> list[Part]:
    """The memory of the training processes beside tensors, on a device that engines use."""
    if not site.colocated:
        return []
    return [_on_device_by_processes("trainer processes", roles, site)]


def _on_device_by_processes(name: str, roles: Sequence[RolePlan], site: Site) -> Part:
    world_size = roles[0].layout.world_size
    measured = ("context", "collectives") if world_size > 1 else ("context",)
    return site.processes.named(name, *measured), site.processes.on_device(world_size, len(roles)), False


def _rollout(roles: Sequence[RolePlan], room: Serving, site: Site) -> Peak:
    parts = [*_awake(room, site), *(site.scorers if site.colocated else ()), *_trainers(roles, site)]
    return _peak(Phase.rollout, Place.device, "a rollout rank", parts, site.device_bytes)


def _sync(roles: Sequence[RolePlan], room: Serving, site: Site, *, highest: int) -> Peak:
    """The peak of a weight update.

    highest: the most bytes of any other phase.  The policy's optimizer state may leave during the update (LEAVING) as
    long as the run does not need more than that.
    """
    arriving: list[Part] = [
        ("weight buckets", 2 * UPDATE_BUCKET_BYTES, False),
        ("engine, a tensor that is quantised", room.converting, True),
    ]
    if not site.colocated:
        return _peak(Phase.sync, Place.device, "a rollout rank", [*_awake(room, site), *arriving], site.device_bytes)
    actor = roles[0]
    awake = [part for part in _awake(room, site) if part[0] in AWAKE_AT_UPDATES]

    def peak(stage: int, leaving: bool) -> Peak:
        state = actor.state(stage)
        weights: Part = ("actor weights", state.weights, True)
        parts = [*awake, weights, (LEAVING, state.optimizer * leaving, True), *arriving, *_trainers(roles, site)]
        return _peak(Phase.sync, Place.device, f"actor, {_where(actor, stage)}", parts, site.device_bytes)

    def worst(leaving: bool) -> Peak:
        return max((peak(stage, leaving) for stage in range(actor.layout.pp)), key=lambda each: each.num_bytes)

    if actor.engine.overlaps_offload(accelerator=actor.accelerator) and worst(leaving=True).num_bytes <= highest:
        return worst(leaving=True)
    return worst(leaving=False)


def _host(roles: Sequence[RolePlan], room: Serving | None, site: Site) -> Iterator[Peak]:
    """The peaks of host memory of a node with accelerators."""
    per_node = min(site.per_node, roles[0].layout.world_size)
    engines = site.engines_per_node if room is not None and site.colocated else 0
    processes, trainers = site.processes, per_node * len(roles)
    needed = ("trainer", "engine") if engines else ("trainer",)
    taken = trainers * processes.trainer + engines * processes.engine
    fixed: list[Part] = [(processes.named("processes", *needed), taken, False), *site.shared_parts]
    if room is not None and site.colocated:
        for role in roles:
            state = _worst(role, lambda each: each.weights + each.optimizer)
            fixed.append((f"{role.name} weights, away", processes.pinned(state.weights) * per_node, True))
            if role.trains:
                fixed.append((f"{role.name} optimizer, away", processes.pinned(state.optimizer) * per_node, True))
        if room.adapters:  # their base is sent once, and then stays with them while they sleep
            fixed.append(("engine weights, asleep", (room.weights + room.adapters) * engines, True))
    for role in roles:
        _, worst = max((role.state(stage).weights, -stage) for stage in range(role.layout.pp))
        frozen = role.frozen_parts(-worst)
        fixed += [(name, processes.pinned(num_bytes) * per_node, exact) for name, num_bytes, exact in frozen]
        if role.teacher_output:
            fixed.append(("teacher output, away", processes.pinned(role.teacher_output) * per_node, True))
    yield _peak(Phase.rollout if room is not None else Phase.update, Place.host, "a node", fixed, site.host_bytes)
    saving = [*fixed]
    if site.saves:
        for role in (each for each in roles if each.trains):
            state = _worst(role, lambda each: each.optimizer)
            saving.append((f"{role.name} checkpoint", processes.pinned(_saved(role, state.optimizer)) * per_node, True))
    if room is not None and site.colocated and not room.adapters:
        # The engines sleep while the actor is exported.
        saving.append(("engine weights, asleep", room.weights * engines, True))
    yield _peak(Phase.save, Place.host, "a node", saving, site.host_bytes)


def _worst(role: RolePlan, size: Callable[[StateBytes], int]) -> StateBytes:
    """The state of the stage that is largest by ``size``."""
    return max((role.state(stage) for stage in range(role.layout.pp)), key=size)


def _saved(role: RolePlan, optimizer_bytes: int) -> int:
    """The bytes that a rank saves, from those of its optimizer; in float32, also its weights beside the moments."""
    if role.engine.precision is Precision.float32:
        return optimizer_bytes * (MAIN_BYTES + 2 * MOMENT_BYTES) // (2 * MOMENT_BYTES)
    return optimizer_bytes


def _on_cpu(roles: Sequence[RolePlan], room: Serving | None, site: Site) -> Iterator[Peak]:
    """The peaks of a machine without accelerators: all processes together, each rank by its own stage."""
    away = room is not None and site.colocated
    fixed: list[Part] = [
        (site.processes.named("processes", "trainer"), site.per_node * len(roles) * site.processes.trainer, False),
        ("controller and Ray", CPU_CONTROLLER_BYTES, False),
        *site.shared_parts,
        *(_engine_parts(room, site) if room is not None else ()),
    ]
    for role in roles:
        fixed += _over_node(role, site, [role.frozen_parts(stage) for stage in range(role.layout.pp)])
    for phase in (Phase.logprobs, Phase.update) if room is not None else (Phase.update,):
        candidates = []
        for role in roles:
            if phase is Phase.update and not role.trains:
                continue
            stages = range(role.layout.pp)
            steps = [role.training(stage) if phase is Phase.update else role.scoring(stage) for stage in stages]
            step = _over_node(role, site, [step_parts(role, each, stage) for stage, each in enumerate(steps)])
            at_work = role if phase is Phase.update else None
            states = [part for each in roles for part in _state_on_cpu(each, site, away and each is not at_work)]
            candidates.append(_peak(phase, Place.device, role.name, [*states, *step, *fixed], site.host_bytes))
        yield max(candidates, key=lambda peak: peak.num_bytes)
    if room is not None:
        states = [part for role in roles for part in _state_on_cpu(role, site, away)]
        yield _peak(Phase.rollout, Place.device, "all processes", [*states, *fixed], site.host_bytes)


def _engine_parts(room: Serving, site: Site) -> list[Part]:
    """The memory of all engines of a machine; glibc keeps what a forward pass used, so it is always counted."""
    ranks = site.engines_per_node
    engines = site.processes.of_engines(ranks, site.ranks_per_engine)
    return [
        (site.processes.named("engine processes", "engine"), engines, False),
        ("engine weights", ranks * room.weights, True),
        ("engine weights, packed besides", ranks * room.packed, True),
        ("engine adapters", ranks * room.adapters, True),
        ("engine, a tensor that is quantised", ranks * room.converting, True),
        # Half: the trainers' slots (sync/slots.py); half: layers that wait (rollout/vllm/receiver/receive_memory.py).
        ("buffers of weight updates", ranks * min(room.weights, UPDATE_BUCKET_BYTES), False),
        ("engine working memory", ranks * room.working, False),
        ("engine, vision tower at work", ranks * room.encoder, False),
        ("cache of keys and values", ranks * room.cache, False),
        *site.scorers,
    ]


def _state_on_cpu(role: RolePlan, site: Site, away: bool) -> list[Part]:
    """The lasting memory of all ranks of a machine.  away: the role is offloaded, which on CPU only frees gradients."""
    parts = _over_node(role, site, [state_parts(role, stage) for stage in range(role.layout.pp)])
    return [part for part in parts if not (away and part[0].endswith("gradients"))]


def _over_node(role: RolePlan, site: Site, stages: Sequence[Sequence[Part]]) -> list[Part]:
    """The parts of all ranks of a node.  stages: for each stage, the parts of one rank."""
    ranks = role.layout.world_size // role.layout.pp
    return [
        (name, ceil(sum(parts[index][1] for parts in stages) * ranks / site.num_nodes), exact)
        for index, (name, _, exact) in enumerate(stages[0])
    ]
