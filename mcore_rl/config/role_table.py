"""The table of all roles, one row each, in the order in which they score the samples of a step.

A new role is a new row, here or in the file of the one algorithm that has it (config/algorithms/prime.py).  The row
creates its configuration group, its processes, its checkpoints, its share of the plan and its metrics; its ``stages``
say what it does in a step.  A trained role also needs a loss function.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mcore_rl.config.algorithm_object import REFERENCE
from mcore_rl.config.algorithm_registry import estimator, estimators, policy_loss
from mcore_rl.config.role import Head, Never, Role
from mcore_rl.config.roles import (
    ActorConfig,
    CriticConfig,
    RouterReplay,
    TeacherConfig,
)
from mcore_rl.config.stages import StepStage
from mcore_rl.ground.errors import ConfigError

if TYPE_CHECKING:
    from mcore_rl.config.run import RunConfig

REF_LOGPROBS = "ref_logprobs_T"
# What a teacher of the loss makes instead of log-probs.
TEACHER_HIDDEN = "teacher_hidden_MH"
TEACHER_SCORED = "teacher_scored_T"
ROUTES = ("routing_TLK", "unrouted_T")  # the experts to repeat, which a batch has with ``actor.router_replay``
FROM_ADVANTAGES = ("advantages_T", "teacher_advantages_T", "weights_T", "selection_T")


def policy_stages(role: Role, run: RunConfig) -> Sequence[StepStage]:
    """The policy is scored as it drew, and trained by what the step has made of that."""
    records = run.actor.router_replay is RouterReplay.r2
    replays = run.actor.router_replay is not RouterReplay.off
    makes = ("old_logprobs_T", "entropy_S", *(["routing_TLK"] if records else []))
    others = [REF_LOGPROBS] if REFERENCE in run.roles else []
    others += teacher_fields(run) if run.algorithm.distill.in_loss else []
    others += policy_loss(run.actor.loss_mode).fields
    routes = ROUTES if replays else ()
    return [
        role.scores(*makes, reads=() if records else routes),
        role.update("old_logprobs_T", *FROM_ADVANTAGES, *others, *routes),
    ]


def teacher_fields(run: RunConfig) -> tuple[str, ...]:
    """What a teacher's pass makes: hidden states for a divergence in the loss, else log-probs."""
    return (TEACHER_HIDDEN, TEACHER_SCORED) if run.algorithm.distill.in_loss else ("teacher_logprobs_T",)


ROLES: dict[str, Role] = {
    role.name: role
    for role in (
        Role(
            name="actor",
            head=Head.lm,
            trains=True,
            publishes=True,
            weights="model.path",
            config=ActorConfig,
            stages=policy_stages,
            loss="mcore_rl.algorithms.policy:policy_loss",
            phase="logprobs",
        ),
        Role(
            name="reference",
            head=Head.lm,
            shares="actor",
            stages=lambda role, run: [role.scores(REF_LOGPROBS)],
            moves=Never(),
            phase="reference",
        ),
        Role(
            name="teacher",
            head=Head.lm,
            weights="teacher.path",
            config=TeacherConfig,
            stages=lambda role, run: [role.scores(*teacher_fields(run))],
            phase="teacher",
        ),
        Role(
            name="critic",
            head=Head.value,
            trains=True,
            weights="critic.path",
            config=CriticConfig,
            stages=lambda role, run: [role.scores("old_values_T"), role.update("old_values_T", "returns_T")],
            loss="mcore_rl.algorithms.value:value_loss",
            phase="values",
        ),
    )
}

# The roles that one algorithm brings, in its own file.
ROLES |= {role.name: role for each in estimators().values() for role in each.roles if isinstance(role, Role)}


def role_table(estimator_name: str) -> dict[str, Role]:
    """``ROLES``, and the roles that the estimator of a user's file brings."""
    try:
        own = estimator(estimator_name).roles
    except ConfigError:  # a violation of ``run_violations``
        own = ()
    return ROLES | {role.name: role for role in own if isinstance(role, Role)}
