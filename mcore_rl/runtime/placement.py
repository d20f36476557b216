"""Places the processes of a run in bundles of Ray placement groups, one group per node of devices.

Training rank r has bundle r.  The ranks of a node are consecutive, because a node's placement group is never split.
Colocated engines share the trainer's bundles by turns; separate engines have bundles of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mcore_rl.config.placement import engine_nodes, engine_place_violations
from mcore_rl.config.role_table import ROLES
from mcore_rl.config.rollout import RolloutLayout
from mcore_rl.config.trainer import Placement, TrainerConfig
from mcore_rl.ground.errors import ConfigError, Violation, refuse_if_any
from mcore_rl.parallel.device import Platform
from mcore_rl.weights.sites import Sites

WAIT_S = 120.0  # how long nodes of a cluster may take to join
CPUS = 1.0  # cores of an accelerator's bundle
TRAINER = ("trainer.nnodes", "trainer.n_gpus_per_node")  # the keys to lower if a reservation fails
# Roles with processes, engines that score, and one spare.  Ray counts shares of a device, and does not enforce them.
ROLES_PER_DEVICE = sum(role.shares is None for role in ROLES.values()) + 2


@dataclass(frozen=True)
class Bundle:
    """The place of one process, or of an engine with its ranks on one node: bundle ``index`` of ``group``."""

    group: PlacementGroup
    index: int

    def options(self, resources: dict[str, float]) -> dict[str, Any]:
        """The Ray options that create an actor in this bundle."""
        strategy = PlacementGroupSchedulingStrategy(self.group, self.index)
        return {"scheduling_strategy": strategy, **resources}


EngineBundles = tuple[Bundle, ...]


@dataclass(frozen=True)
class Places:
    """The bundles of a run.

    train: one per training rank.
    rollout: of each engine, one per node that it is on.
    scorers: the same of engines that score, by their configuration group.
    share: the number of accelerators that Ray counts for one training process.
    groups: the placement groups of all bundles.
    """

    train: tuple[Bundle, ...]
    rollout: tuple[EngineBundles, ...]
    share: float
    groups: tuple[PlacementGroup, ...]
    scorers: Mapping[str, tuple[EngineBundles, ...]] = field(default_factory=dict)

    def sites(self, layout: RolloutLayout, placement: Placement) -> Sites:
        """Where the training ranks and the rollout ranks of ``layout`` are, by the nodes that Ray chose.

        A colocated engine's ranks are on the devices from its first bundle on.  On a CPU they are on the nodes of its
        bundles, and the training processes of a node receive for the ranks there in turn.
        """
        numbers: dict[str, int] = {}
        train = [numbers.setdefault(each, len(numbers)) for each in map(_node_of, self.train)]
        if placement is Placement.colocated and self.share:
            return Sites.colocated(train, layout.world_size)
        bundles = [(bundle, layout.engine_size // len(engine)) for engine in self.rollout for bundle in engine]
        nodes = [(numbers.setdefault(_node_of(bundle), len(numbers)), ranks) for bundle, ranks in bundles]
        rollout = tuple(node for node, ranks in nodes for _ in range(ranks))
        if placement is Placement.separate:
            return Sites(tuple(train), rollout)
        turns = {node: cycle([rank for rank, at in enumerate(train) if at == node]) for node in set(rollout)}
        return Sites(tuple(train), rollout, tuple(next(turns[node]) for node in rollout))

    @property
    def nodes(self) -> frozenset[str]:
        """The ids of the nodes that have a part of the run."""
        return frozenset(
            node for group in self.groups for node in placement_group_table(group)["bundles_to_node_id"].values()
        )

    def close(self) -> None:
        """Removes the placement groups, which frees their resources."""
        for group in self.groups:
            remove_placement_group(group)


def _node_of(bundle: Bundle) -> str:
    """The id of the node on which Ray placed ``bundle``."""
    table = placement_group_table(bundle.group)
    node: str = table["bundles_to_node_id"][bundle.index]
    return node


def placement_violations(
    trainer: TrainerConfig, layout: RolloutLayout, platform: Platform, key: str = "rollout"
) -> list[Violation]:
    """Why engines of ``layout`` cannot be placed.  key: the configuration group of their sizes.

    Without accelerators nothing is counted, except for an engine that must be on several nodes.
    """
    if not platform.is_accelerator and not _spans(trainer, layout):
        return []
    return engine_place_violations(trainer, layout, key, per_node=_devices_per_node(trainer, layout, platform))


async def place(
    trainer: TrainerConfig,
    layout: RolloutLayout,
    platform: Platform,
    scorers: Mapping[str, RolloutLayout] | None = None,
) -> Places:
    """Reserves bundles for the training ranks and the engines, and waits until Ray has reserved them.

    layout: of the rollout engines.  scorers: layouts of engines that score, by their configuration group; they are
    placed like rollout engines.
    Raises ConfigError if the cluster does not have the resources, or not within ``WAIT_S``.
    """
    layouts = {"rollout": layout, **(scorers or {})}
    refuse_if_any([each for key in layouts for each in placement_violations(trainer, layouts[key], platform, key)])
    separate = trainer.placement is Placement.separate
    if not platform.is_accelerator:
        return await _on_cpu(trainer, layouts)
    device = {"CPU": CPUS, "GPU": 1.0}
    per_node = {key: _devices_per_node(trainer, each, platform) for key, each in layouts.items()}
    wanted = [[device] * trainer.n_gpus_per_node for _ in range(trainer.nnodes)]
    groups = [placement_group(bundles, strategy="STRICT_PACK") for bundles in wanted]
    own = {key: _engine_groups(each, per_node[key]) if separate else [] for key, each in layouts.items()}
    every = [*groups, *(group for those in own.values() for group in those)]
    await _ready(every, f"{trainer.nnodes} nodes of {trainer.n_gpus_per_node} accelerators each", TRAINER)
    train = tuple(Bundle(group, i) for group in groups for i in range(trainer.n_gpus_per_node))
    places = {
        key: tuple(map(_bundles_of, own[key])) if separate else _colocated(each, per_node[key], train)
        for key, each in layouts.items()
    }
    return Places(train, places.pop("rollout"), 1 / ROLES_PER_DEVICE, tuple(every), places)


async def place_trainers(trainer: TrainerConfig, platform: Platform) -> Places:
    """Like ``place``, for a run without rollout engines."""
    return await place(replace(trainer, placement=Placement.colocated), RolloutLayout(), platform)


async def place_engines(layout: RolloutLayout, platform: Platform, key: str = "rollout") -> Places:
    """Like ``place``, for a run without trainer: every engine has devices of its own.

    Their bundles are ``Places.rollout``, whatever the engines run.  key: see ``placement_violations``.
    """
    alone = TrainerConfig(placement=Placement.separate)
    refuse_if_any(placement_violations(alone, layout, platform, key))
    if not platform.is_accelerator:
        return replace(await _on_cpu(alone, {"rollout": layout}), train=())
    per_node = _devices_per_node(alone, layout, platform)
    groups = _engine_groups(layout, per_node)
    nodes = engine_nodes(layout, per_node)
    of_nodes = "one node" if nodes == 1 else f"{nodes} whole nodes"
    wanted = f"{layout.num_engines} times {layout.engine_size} accelerators of {of_nodes}"
    await _ready(groups, wanted, (f"{key}.dp", f"{key}.tp"))
    return Places((), tuple(map(_bundles_of, groups)), 0.0, tuple(groups))


async def place_engine(
    trainer: TrainerConfig, layout: RolloutLayout, platform: Platform, train: Sequence[Bundle], slot: int
) -> EngineBundles:
    """Bundles for one more engine beside a trainer in ``train``, as ``place`` gives them to engines with own devices.

    layout: of that engine alone.  slot: its place among the engines.
    Raises ConfigError if the cluster does not have the resources, or not within ``WAIT_S``.
    """
    if not platform.is_accelerator:
        return _engines_on_cpu(trainer, replace(layout, dp=(slot + 1) * layout.engine_dp), train)[slot]
    refuse_if_any(placement_violations(trainer, layout, platform))
    groups = _engine_groups(layout, _devices_per_node(trainer, layout, platform))
    await _ready(groups, f"{layout.engine_size} accelerators", ("--add", "--add"))
    return _bundles_of(groups[0])


def free_engine(bundles: EngineBundles, train: Sequence[Bundle]) -> None:
    """Frees the devices of an engine that has ended, unless they are the trainer's."""
    if bundles[0].group not in [bundle.group for bundle in train]:
        remove_placement_group(bundles[0].group)


def live_nodes() -> frozenset[str]:
    """The ids of all nodes that Ray has now."""
    return frozenset(str(node["NodeID"]) for node in ray.nodes() if node["Alive"])


def node_names(nodes: Iterable[str]) -> list[str]:
    """The names of nodes, by their ids, sorted."""
    names = {str(node["NodeID"]): str(node["NodeName"]) for node in ray.nodes()}
    return sorted(names.get(node, node) for node in nodes)


def cluster_cores() -> int:
    """The cores that Ray counts on all its nodes."""
    return int(ray.cluster_resources().get("CPU", 0.0))


def nodes_of(bundles: Sequence[Bundle]) -> frozenset[str]:
    """The ids of the nodes on which Ray placed ``bundles``."""
    return frozenset(map(_node_of, bundles))


def _devices_per_node(trainer: TrainerConfig, layout: RolloutLayout, platform: Platform) -> int:
    """The accelerators of a node that has engines of ``layout``; without accelerators, a node's training processes.

    ``separate`` engines are on the largest nodes that Ray has; while it has none with accelerators, on one node each.
    """
    if trainer.placement is Placement.colocated or not platform.is_accelerator:
        return trainer.n_gpus_per_node
    most = max((node["Resources"].get("GPU", 0.0) for node in ray.nodes() if node["Alive"]), default=0.0)
    return int(most) or layout.engine_size


def _colocated(layout: RolloutLayout, per_node: int, train: Sequence[Bundle]) -> tuple[EngineBundles, ...]:
    """The bundle of each engine's first device on each of its nodes."""
    size = layout.engine_size
    nodes = engine_nodes(layout, per_node)
    firsts = [train[rank] for rank in range(0, layout.world_size, size // nodes)]
    return tuple(tuple(firsts[at : at + nodes]) for at in range(0, len(firsts), nodes))


def _engine_groups(layout: RolloutLayout, per_node: int) -> list[PlacementGroup]:
    """A placement group for each engine: for each of its nodes, a bundle with its devices there."""
    nodes = engine_nodes(layout, per_node)
    strategy = "STRICT_PACK" if nodes == 1 else "STRICT_SPREAD"
    devices = layout.engine_size // nodes
    bundles = [{"CPU": CPUS * devices, "GPU": float(devices)}] * nodes
    return [placement_group(bundles, strategy=strategy) for _ in range(layout.num_engines)]


def _bundles_of(group: PlacementGroup) -> EngineBundles:
    return tuple(Bundle(group, index) for index in range(group.bundle_count))


async def _on_cpu(trainer: TrainerConfig, layouts: Mapping[str, RolloutLayout]) -> Places:
    """All processes share the cores; threads and affinity, not Ray, decide which core computes what.

    The bundles of a node divide its cores evenly.  If there are fewer nodes than ``trainer.nnodes``, as on a laptop,
    Ray places the bundles wherever there is room.
    """
    nodes = sorted((node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]), reverse=True)
    apart = len(nodes) >= trainer.nnodes
    world_size = trainer.world_size
    share = nodes[trainer.nnodes - 1] / trainer.n_gpus_per_node if apart else nodes[-1] / -(-world_size // len(nodes))
    wanted = [trainer.n_gpus_per_node] * trainer.nnodes if apart else [world_size]
    strategy = "STRICT_PACK" if apart else "PACK"
    groups = [placement_group([{"CPU": share}] * count, strategy=strategy) for count in wanted]
    await _ready(groups, f"{world_size} times {share:g} cores", TRAINER)
    train = tuple(Bundle(group, index) for group, count in zip(groups, wanted, strict=True) for index in range(count))
    places = {key: _engines_on_cpu(trainer, layout, train) for key, layout in layouts.items()}
    return Places(train, places.pop("rollout"), 0.0, tuple(groups), places)


def _engines_on_cpu(
    trainer: TrainerConfig, layout: RolloutLayout, train: Sequence[Bundle]
) -> tuple[EngineBundles, ...]:
    """Engines take the training ranks' bundles in turn; one that must be on several nodes, a bundle of each."""
    nodes = engine_nodes(layout, trainer.n_gpus_per_node) if _spans(trainer, layout) else 1
    step = trainer.n_gpus_per_node if nodes > 1 else 1
    turns = cycle(train[::step])
    return tuple(tuple(islice(turns, nodes)) for _ in range(layout.num_engines))


def _spans(trainer: TrainerConfig, layout: RolloutLayout) -> bool:
    """Whether an engine without accelerators is on several nodes: one that a node has too few processes for."""
    return trainer.nnodes > 1 and layout.engine_size > trainer.n_gpus_per_node


async def _ready(groups: Sequence[PlacementGroup], wanted: str, keys: tuple[str, str]) -> None:
    try:
        # Not wait_for: interrupted, it leaves the error of gather's future for Python to print when the program ends.
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*(group.ready() for group in groups))
    except TimeoutError as error:
        there = ", ".join(
            f"{count:g} {name}" for name, count in ray.cluster_resources().items() if name in ("CPU", "GPU")
        )
        for group in groups:
            remove_placement_group(group)
        problem = f"{wanted} were not free within {WAIT_S:g} s; the cluster has {there}"
        remedy = f"Lower {' or '.join(keys)}, or see what else runs with ray status"
        raise ConfigError([Violation(keys[0], "", problem, remedy)]) from error
