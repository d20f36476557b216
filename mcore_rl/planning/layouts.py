"""Enumerates the layouts in which a model can be trained on a cluster, and keeps those that fit by the planner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import TypeVar

from mcore_rl.config.cluster import ClusterConfig
from mcore_rl.config.engine import EngineConfig, Recompute
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.offline import OfflineConfig
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.config.role import Head
from mcore_rl.config.roles import trains_tower
from mcore_rl.config.run import RunConfig
from mcore_rl.families.flops import forward_flops, tower_flops
from mcore_rl.parallel.layout import Layout, balanced_layers, divisor_limits, divisors, tensor_sizes
from mcore_rl.planning.activations import engine_on
from mcore_rl.planning.memory import Site, peaks
from mcore_rl.planning.peaks import Phase
from mcore_rl.planning.serving import Serving
from mcore_rl.planning.states import ModelSizes, States
from mcore_rl.planning.training import RolePlan, Work, lora_of

E = TypeVar("E", bound=EngineConfig)
MAX_VPP = 4
MAX_CP = 16
SHORTEST_CP = 4096  # the fewest tokens of a sequence per context rank with which its work hides the communication
MAX_EP_NODES = 4  # nodes that the experts of a layer may be spread over
MICROBATCH_FACTORS = (1, 2, 4)  # sizes of microbatches, in longest sequences or pairs
LEAST_MICROBATCH = 4096  # tokens of a microbatch at least, for short sequences


@dataclass(frozen=True)
class Training:
    """A training layout that fits.  tokens: of a microbatch.  roles: the plans of all roles, the policy first."""

    parallel: ParallelConfig
    recompute: Recompute
    tokens: int
    roles: tuple[RolePlan, ...]

    def of(self, role: E) -> E:
        """The settings ``role`` with this layout, recompute and microbatch size."""
        changes = dict(
            parallel=self.parallel, recompute=self.recompute, microbatch_tokens=self.tokens, microbatch_sequences=None
        )
        return replace(role, **changes)  # type: ignore[arg-type]  # all trained roles have the field parallel


def trainings(
    run: RunConfig | OfflineConfig,
    model: ModelConfig,
    cluster: ClusterConfig,
    frozen: Sequence[RolePlan],
    work: Work,
    site: Site,
    room: Serving | None,
    refused: Counter[str],
    teacher_output: Callable[[int], int] = lambda _: 0,
) -> Iterator[Training]:
    """Yields the layouts that fit, each with the least recompute with which it fits.

    All trained roles have one layout.
    frozen: the other roles, each in its own layout.
    work, site: what a role processes, and where the run is placed.
    room: the memory of a rollout rank; None without rollout.
    refused: counts the refused layouts by their reason.
    teacher_output: tensor ranks of the policy -> ``RolePlan.teacher_output``.
    """
    rows = [role for role in run.group_rows if role.trains]
    world_size = run.trainer.world_size
    engines = {row.name: engine_on(cluster, run.role_config(row)) for row in rows}
    sizes = {row.name: ModelSizes(model, head=row.head) for row in rows}
    precision = engines[rows[0].name].precision
    learns = any(trains_tower(engine) for engine in engines.values())
    tower = tower_layers(model, work, learns=learns)
    for parallel in layouts(model, world_size, site.per_node, work.longest, tower):
        layout = Layout.of(parallel, world_size)
        if work.sequences < layout.dp:
            refused[f"fewer than one sequence for each of dp={layout.dp} ranks in a minibatch"] += 1
            continue
        states = {
            name: States(
                sizes[name],
                parallel,
                world_size,
                precision,
                overlap=engines[name].overlaps_reduction(accelerator=site.device_bytes is not None),
                lora=lora_of(engines[name]),
                frozen_tower=not trains_tower(engines[name]),
            )
            for name in sizes
        }
        floor = max(sum(each.of_stage(stage).total for each in states.values()) for stage in range(layout.pp))
        if floor > (site.device_bytes or 0):
            refused["weights, gradients and optimizer alone exceed a device"] += 1
            continue
        most = work.sequences // layout.dp * work.longest
        for tokens in microbatches(work.together * work.longest, most, layout.cp):
            for recompute in Recompute:
                trained = [
                    RolePlan(
                        row.name,
                        model,
                        replace(
                            engines[row.name], recompute=recompute, microbatch_tokens=tokens, microbatch_sequences=None
                        ),
                        parallel,
                        world_size,
                        work,
                        accelerator=True,
                        head=row.head,
                        publishes=row.publishes,
                        frozen=run.snapshots_of(row.name),
                        states=states[row.name],
                    )
                    for row in rows
                ]
                trained[0].teacher_output = teacher_output(parallel.tp)
                roles = (*trained, *frozen)
                if layout.vpp > 1 and roles[0].num_microbatches < 2 * layout.pp:
                    refused["too few microbatches for an interleaved schedule"] += 1
                    continue
                if not all(peak.fits for peak in peaks(roles, room, site) if peak.phase is Phase.update):
                    refused[f"update exceeds a device, recompute={recompute.value}"] += 1
                    continue
                yield Training(parallel, recompute, tokens, roles)
                break  # more recompute is slower


def tower_layers(model: ModelConfig, work: Work, *, learns: bool) -> float:
    """The layers of the language model that take as many operations in training as the vision tower.

    learns: whether the tower does; with its recompute it then takes as much more as a layer does.
    """
    tower = tower_flops(model, work.pictures.mean)
    layer = forward_flops(model, [max(1, round(work.mean))], head=Head.hidden) / model.num_layers
    return tower * (1 if learns else 1 / 3) / layer


def layouts(
    model: ModelConfig, world_size: int, per_node: int, longest: int, tower: float = 0.0
) -> Iterator[ParallelConfig]:
    """The layouts worth trying: tp inside a node, etp 1 or tp, experts over few nodes, cp only for long sequences.

    tower: see ``tower_layers``; so many layers fewer than others the first stage may have.
    """
    limits = {axis: gcd(*by_key.values()) for axis, by_key in divisor_limits(model).items()}
    for pp in (size for size in divisors(world_size) if size <= model.num_layers):
        stage = world_size // pp
        for tp in (size for size in tensor_sizes(model, stage) if size <= per_node):
            for cp in (size for size in divisors(stage // tp) if size <= MAX_CP):
                if cp > 1 and longest < SHORTEST_CP * cp:
                    continue
                for etp in {1, tp} if model.moe is not None and limits["etp"] % tp == 0 else {1}:
                    eps = divisors(gcd(stage // etp, limits["ep"])) if stage % etp == 0 else []
                    for ep in eps:
                        if ep * etp <= MAX_EP_NODES * per_node:
                            yield from _placed(model, ParallelConfig(tp=tp, pp=pp, cp=cp, ep=ep, etp=etp), tower)


def _placed(model: ModelConfig, layout: ParallelConfig, tower: float) -> Iterator[ParallelConfig]:
    """``layout`` with every number of chunks per stage; layers are balanced if they do not divide evenly.

    Of a model with a tower also with a shorter first chunk, which pays for it.
    """
    least = 1 if model.vision is None else max(1, len(model.vision.deepstack))
    for vpp in range(1, MAX_VPP + 1 if layout.pp > 1 else 2):
        chunks = layout.pp * vpp
        if chunks > model.num_layers or (vpp > 1 and model.num_layers % chunks):
            continue
        uneven = balanced_layers(model.num_layers, chunks) if model.num_layers % chunks else None
        if model.num_layers // chunks >= least:
            yield replace(layout, vpp=vpp, pipeline_layers=uneven)
        first = max(least, round((model.num_layers + tower) / chunks - tower))
        if vpp == 1 and chunks > 1 and first < model.num_layers // chunks:
            others = balanced_layers(model.num_layers - first, chunks - 1)
            yield replace(layout, vpp=vpp, pipeline_layers=[first, *others])


def microbatches(longest: int, most: int, cp: int) -> list[int]:
    """Sizes of microbatches worth trying, tokens: multiples of the longest, up to the size of a minibatch.

    longest: tokens of the longest sequence or pair.  most: tokens of a data-parallel rank in a minibatch.
    cp: context ranks.
    """
    least = max(-(-longest // 1024) * 1024, LEAST_MICROBATCH * cp)
    return sorted({min(least * factor, max(least, -(-most // 1024) * 1024)) for factor in MICROBATCH_FACTORS})
