"""How many rollout engines there are, and whether they fit on a cluster's nodes, for the runtime and the planner."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from mcore_rl.config.offline import OfflineConfig
from mcore_rl.config.rollout import RolloutLayout
from mcore_rl.config.run import RunConfig
from mcore_rl.config.trainer import Placement, TrainerConfig
from mcore_rl.ground.errors import Violation

AnyRun = TypeVar("AnyRun", bound=RunConfig | OfflineConfig)


def with_replicas(run: AnyRun, *, on_accelerators: bool) -> AnyRun:
    """A run of ``train`` with a number for ``rollout.dp``: if none is written, all that the trainer's devices hold.

    Engines that spread their experts over replicas (``rollout.ep`` above ``rollout.tp``) are one, of ``ep`` ranks.
    Engines with devices of their own, and engines on CPU cores, which they share whatever their number, are one too.
    A run of ``sft`` has none, and is returned as it is.
    """
    if not isinstance(run, RunConfig) or run.rollout.dp is not None:
        return run
    rollout = run.rollout
    trainer = run.trainer
    dp = 1
    if on_accelerators and trainer.placement is Placement.colocated:
        dp = max(1, (rollout.ep if rollout.ep > rollout.tp else trainer.world_size) // rollout.tp)
    return replace(run, rollout=replace(rollout, dp=dp))


def engine_place_violations(
    trainer: TrainerConfig, layout: RolloutLayout, key: str = "rollout", *, per_node: int | None = None
) -> list[Violation]:
    """Why engines of ``layout`` cannot be placed.

    An engine is on one node or on whole nodes.

    Args:
        trainer: with ``colocated`` the engines are on its devices, with ``separate`` on others.
        key: the configuration group of the engines' sizes, for the messages.
        per_node: accelerators of the nodes of ``separate`` engines; None: not known, and not checked.
    """
    colocated = trainer.placement is Placement.colocated
    violations = []
    if colocated and layout.world_size > trainer.world_size:
        problem = f"with {key}.tp={layout.tp} needs {layout.world_size} devices of the trainer's {trainer.world_size}"
        remedy = f"Write {key}.dp={max(1, trainer.world_size // layout.tp)}, or trainer.placement=separate"
        wide = Violation(f"{key}.dp", layout.dp, problem, remedy)
        if layout.tp > trainer.world_size:
            problem = f"an engine needs {layout.engine_size} devices of the trainer's {trainer.world_size}"
            remedy = f"Write {key}.tp={trainer.world_size} or less, more trainer.nnodes, or trainer.placement=separate"
            wide = Violation(f"{key}.tp", layout.tp, problem, remedy)
        violations.append(wide)
    size = trainer.n_gpus_per_node if colocated else per_node
    if size and not (_on_whole_nodes(layout, size) or _on_one_node(layout, size, shares=colocated)):
        nodes = f"divides trainer.n_gpus_per_node={size}" if colocated else f"fits on the {size} accelerators of a node"
        problem = f"an engine of {layout.engine_size} devices neither {nodes} nor takes whole nodes"
        violations.append(Violation(f"{key}.tp", layout.tp, problem, f"Write a divisor or a multiple of {size}"))
    return violations


def engine_nodes(layout: RolloutLayout, per_node: int) -> int:
    """The nodes that an engine of ``layout`` is on, each with an equal share of its ranks.

    per_node: accelerators of a node; the engine fits, see ``engine_place_violations``.
    """
    return max(1, layout.engine_size // per_node)


def _on_one_node(layout: RolloutLayout, per_node: int, *, shares: bool) -> bool:
    """shares: engines follow one another over the devices of all nodes, so that each must divide a node."""
    return layout.engine_size <= per_node and (not shares or per_node % layout.engine_size == 0)


def _on_whole_nodes(layout: RolloutLayout, per_node: int) -> bool:
    """Also each of its replicas must be on whole nodes, or nodes have several whole replicas."""
    return layout.engine_size % per_node == 0 and (layout.tp % per_node == 0 or per_node % layout.tp == 0)
