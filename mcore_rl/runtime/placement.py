"""Where the processes of a run stand: bundles of Ray placement groups, one group for each node's worth of devices.

Training rank r has bundle r; ranks of one node are neighbours, because a placement group of a node is never split.
Colocated engines take turns with the trainer on its bundles; separate ones have bundles of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mcore_rl.config.rollout import RolloutLayout
from mcore_rl.config.trainer import Placement, TrainerConfig
from mcore_rl.errors import ConfigError, Violation, refuse_if_any
from mcore_rl.parallel.device import Platform

WAIT_S = 120.0  # for a cluster whose nodes are still coming
CPUS = 1.0  # of an accelerator's bundle
TRAINER = ("trainer.nnodes", "trainer.n_gpus_per_node")  # what is too much where a reservation fails
ENGINES = ("rollout.dp", "rollout.tp")
ROLES_PER_DEVICE = 4  # actor, critic, reward model, and room: Ray counts the shares, nobody enforces them


@dataclass(frozen=True)
class Bundle:
    """A place for one process, or for an engine with all of its ranks."""

    group: PlacementGroup
    index: int

    def options(self, resources: dict[str, float]) -> dict[str, Any]:
        """What an actor is created with to stand here."""
        strategy = PlacementGroupSchedulingStrategy(self.group, self.index)
        return {"scheduling_strategy": strategy, **resources}


@dataclass(frozen=True)
class Places:
    """train: of each training rank.  rollout: of each engine.  share: accelerators that one training process counts."""

    train: tuple[Bundle, ...]
    rollout: tuple[Bundle, ...]
    share: float
    groups: tuple[PlacementGroup, ...]

    def close(self) -> None:
        """Give the resources back."""
        for group in self.groups:
            remove_placement_group(group)


def placement_violations(trainer: TrainerConfig, layout: RolloutLayout, platform: Platform) -> list[Violation]:
    """What keeps ``layout``'s engines from standing where ``trainer`` says."""
    each, per_node = layout.tp * layout.engine_dp, trainer.n_gpus_per_node
    if not platform.is_accelerator or trainer.placement is Placement.separate:
        return []
    found = []
    if layout.world_size > trainer.world_size:
        problem = f"with rollout.tp={layout.tp} needs {layout.world_size} devices of the trainer's {trainer.world_size}"
        remedy = f"Write rollout.dp={max(1, trainer.world_size // layout.tp)}, or trainer.placement=separate"
        found.append(Violation("rollout.dp", layout.dp, problem, remedy))
    if per_node % each:
        problem = f"an engine of {each} devices does not divide trainer.n_gpus_per_node={per_node}"
        found.append(Violation("rollout.tp", layout.tp, problem, f"Write a divisor of {per_node}"))
    return found


async def place(trainer: TrainerConfig, layout: RolloutLayout, platform: Platform) -> Places:
    """Reserve bundles for the training ranks and the engines, and wait until they are there.

    Raises ConfigError where the cluster has not what is asked for, or not in ``WAIT_S``.
    """
    refuse_if_any(placement_violations(trainer, layout, platform))
    each = layout.tp * layout.engine_dp
    num_engines = layout.world_size // each
    separate = trainer.placement is Placement.separate
    if not platform.is_accelerator:
        return await _on_cpu(trainer.world_size, num_engines)
    device = {"CPU": CPUS, "GPU": 1.0}
    wanted = [[device] * trainer.n_gpus_per_node for _ in range(trainer.nnodes)]
    if separate:
        wanted += _engine_bundles(layout)
    groups = [placement_group(bundles, strategy="STRICT_PACK") for bundles in wanted]
    await _ready(groups, f"{trainer.nnodes} nodes of {trainer.n_gpus_per_node} accelerators each", TRAINER)
    train = tuple(Bundle(group, i) for group in groups[: trainer.nnodes] for i in range(trainer.n_gpus_per_node))
    rollout = tuple(Bundle(group, 0) for group in groups[trainer.nnodes :])
    if not separate:
        rollout = tuple(train[engine * each] for engine in range(num_engines))
    return Places(train, rollout, 1 / ROLES_PER_DEVICE, tuple(groups))


async def place_trainers(trainer: TrainerConfig, platform: Platform) -> Places:
    """As ``place``, for a run without rollout."""
    return await place(replace(trainer, placement=Placement.colocated), RolloutLayout(), platform)


async def place_engines(layout: RolloutLayout, platform: Platform) -> Places:
    """As ``place``, for a run without trainer: every engine has devices of its own."""
    num_engines = layout.world_size // (layout.tp * layout.engine_dp)
    if not platform.is_accelerator:
        return replace(await _on_cpu(1, num_engines), train=())
    groups = [placement_group(bundles, strategy="STRICT_PACK") for bundles in _engine_bundles(layout)]
    await _ready(groups, f"{num_engines} times {layout.tp * layout.engine_dp} accelerators of one node", ENGINES)
    return Places((), tuple(Bundle(group, 0) for group in groups), 0.0, tuple(groups))


def _engine_bundles(layout: RolloutLayout) -> list[list[dict[str, float]]]:
    """Of the group of each engine: one bundle with all of its devices."""
    each = layout.tp * layout.engine_dp
    return [[{"CPU": CPUS * each, "GPU": float(each)}]] * (layout.world_size // each)


async def _on_cpu(world_size: int, num_engines: int) -> Places:
    """All take turns on the cores there are; which core computes what is for threads and affinity, not for Ray."""
    share = float(ray.cluster_resources().get("CPU", 0)) / world_size
    group = placement_group([{"CPU": share}] * world_size, strategy="PACK")
    await _ready([group], f"{world_size} times {share:g} cores", TRAINER)
    train = tuple(Bundle(group, rank) for rank in range(world_size))
    return Places(train, tuple(train[engine % world_size] for engine in range(num_engines)), 0.0, (group,))


async def _ready(groups: Sequence[PlacementGroup], wanted: str, keys: tuple[str, str]) -> None:
    try:
        await asyncio.wait_for(asyncio.gather(*(group.ready() for group in groups)), WAIT_S)
    except TimeoutError as error:
        there = ", ".join(
            f"{count:g} {name}" for name, count in ray.cluster_resources().items() if name in ("CPU", "GPU")
        )
        for group in groups:
            remove_placement_group(group)
        problem = f"{wanted} were not free within {WAIT_S:g} s; the cluster has {there}"
        remedy = f"Lower {' or '.join(keys)}, or see what else runs with ray status"
        raise ConfigError([Violation(keys[0], "", problem, remedy)]) from error
