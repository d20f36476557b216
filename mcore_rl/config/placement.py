"""Checks whether rollout engines fit on the trainer's accelerators, for the runtime and for the planner."""

from __future__ import annotations

from mcore_rl.config.rollout import RolloutLayout
from mcore_rl.config.trainer import Placement, TrainerConfig
from mcore_rl.errors import Violation


def engine_place_violations(trainer: TrainerConfig, layout: RolloutLayout, key: str = "rollout") -> list[Violation]:
    """Why engines of ``layout`` cannot be placed on the devices of ``trainer``; an engine must fit on one node.

    key: the configuration group of the engines' sizes, for the messages.
    """
    each, per_node = layout.tp * layout.engine_dp, trainer.n_gpus_per_node
    if trainer.placement is Placement.separate:
        return []
    violations = []
    if layout.world_size > trainer.world_size:
        problem = f"with {key}.tp={layout.tp} needs {layout.world_size} devices of the trainer's {trainer.world_size}"
        remedy = f"Write {key}.dp={max(1, trainer.world_size // layout.tp)}, or trainer.placement=separate"
        violations.append(Violation(f"{key}.dp", layout.dp, problem, remedy))
    if per_node % each:
        problem = f"an engine of {each} devices does not divide trainer.n_gpus_per_node={per_node}"
        violations.append(Violation(f"{key}.tp", layout.tp, problem, f"Write a divisor of {per_node}"))
    return violations
