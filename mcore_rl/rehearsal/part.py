"""From a run and its cluster to what is rehearsed of it, and to the planner's figures for the same.

The planner is asked for the layers that are rehearsed: the local ones, also where the run itself takes Transformer
Engine's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mcore_rl.config.algorithm_object import TEACHER
from mcore_rl.config.cluster import ClusterConfig
from mcore_rl.config.engine import LayerSpec
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.offline import OfflineConfig
from mcore_rl.config.role import Role
from mcore_rl.config.role_table import ROLES
from mcore_rl.config.run import RunConfig
from mcore_rl.config.schedule import of_length
from mcore_rl.config.stages import Update, is_field
from mcore_rl.ground.errors import ConfigError, Violation
from mcore_rl.planning.activations import EXPERT_IMBALANCE, kernels_of
from mcore_rl.planning.distillation import num_teachers, output_bytes
from mcore_rl.planning.overheads import GIB
from mcore_rl.planning.plan import offline_role_plan, role_plan
from mcore_rl.planning.states import StateBytes
from mcore_rl.planning.training import RolePlan, StepBytes
from mcore_rl.rehearsal.rank import RehearsedRank, RehearsedTeachers

UPDATES = 1000  # of a run whose data nobody has read; learning rates change nothing that is rehearsed


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The planner's figures for one rank.  fused: whether the run itself is to take Transformer Engine's layers."""

    state: StateBytes
    train: StepBytes
    score: StepBytes
    fused: bool

    @property
    def peak(self) -> int:
        """The bytes of state and of a training step's tensors."""
        return self.state.total + self.train.total


def trained_roles(run: RunConfig | OfflineConfig, name: str = "") -> list[Role]:
    """The trained roles of ``run``, the policy first; or the one called ``name``.  Raises ConfigError without it."""
    there = list(reversed(run.trained_rows))
    if not name:
        return there
    chosen = [role for role in there if role.name == name]
    if not chosen:
        names = " or ".join(role.name for role in there)
        raise ConfigError([Violation("role", name, "is not trained in this run", f"Write role={names}")])
    return chosen


def part_of(
    run: RunConfig | OfflineConfig,
    model: ModelConfig,
    cluster: ClusterConfig,
    role: Role,
    rank: int,
    others: Mapping[str, ModelConfig],
) -> tuple[RehearsedRank, Planned]:
    """What is rehearsed of ``role`` on ``rank``, and what the planner says of it.

    model: the policy's.  others: the models of roles that start from another checkpoint, by name of the role.
    Raises ConfigError for a layout that does not divide the model or the world, and for a rank that the run does not
    have.
    """
    model = others.get(role.name, model)
    of_run = (
        offline_role_plan(model, run, cluster)
        if isinstance(run, OfflineConfig)
        else role_plan(role, model, run, cluster)
    )
    layout = of_run.layout
    config = of_run.engine
    if not 0 <= rank < layout.world_size:
        problem = f"the run has {layout.world_size} ranks"
        remedy = f"Write rank=0 to rank={layout.world_size - 1}"
        raise ConfigError([Violation("rank", rank, problem, remedy)])
    loss = run.loss_of(role)
    local = replace(config, layer_spec=LayerSpec.local)
    planner = RolePlan(
        role.name,
        model,
        local,
        of_run.parallel,
        layout.world_size,
        of_run.work,
        accelerator=of_run.accelerator,
        head=role.head,
        with_full_kl=of_run.with_full_kl,
        states=of_run.states,
    )
    teachers = None
    if isinstance(run, RunConfig) and loss.distill is not None:
        planner.teacher_output = output_bytes(run, model, others, layout.tp)
        teachers = _teachers(run, others.get(TEACHER, model))
    stage = layout.coords(rank).pp
    reads = [name for stage in role.stages(role, run) if isinstance(stage, Update) for name in stage.reads]
    part = RehearsedRank(
        role=role.name,
        model=model,
        engine=replace(config, optim=of_length(config.optim, UPDATES)),
        parallel=of_run.parallel,
        world_size=layout.world_size,
        rank=rank,
        head=role.head,
        accelerator=of_run.accelerator,
        device_bytes=int(cluster.gpu_memory_gib * GIB),
        tokens=planner.tokens,
        longest=planner.work.longest,
        pictures=tuple(planner.microbatch_pictures),
        learns_to_see=planner.learns_to_see,
        num_microbatches=planner.num_microbatches,
        imbalance=EXPERT_IMBALANCE,
        loss=loss,
        reads=tuple(name for name in reads if is_field(name)),
        with_entropy=loss.with_entropy,
        teachers=teachers,
    )
    planned = Planned(
        state=planner.states.of_rank(rank),
        train=planner.training(stage),
        score=planner.scoring(stage),
        fused=kernels_of(model, of_run.parallel, config, accelerator=of_run.accelerator).fused,
    )
    return part, planned


def _teachers(run: RunConfig, model: ModelConfig) -> RehearsedTeachers:
    """The teachers in the policy's loss, whose architecture is ``model``."""
    return RehearsedTeachers(
        count=num_teachers(run),
        hidden_size=model.hidden_size,
        precision=run.role_config(ROLES[TEACHER]).precision,
        soft_cap=model.output_soft_cap,
    )
