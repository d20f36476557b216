"""The table of all roles, one row each, in the order in which they score the samples of a step.

A new role is a new row.  The row creates its configuration group, its processes, its passes in a step, its checkpoints,
its share of the plan and its metrics.  A trained role also needs a loss function.
"""

from __future__ import annotations

from mcore_rl.config.role import Head, Never, Role
from mcore_rl.config.roles import ActorConfig, CriticConfig, ProcessRewardConfig, TeacherConfig

# What a teacher of the loss makes instead of log-probs: ``config.run.RunConfig.role_rows``.
TEACHER_HIDDEN, TEACHER_SCORED = "teacher_hidden_MH", "teacher_scored_T"

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
            makes=("old_logprobs_T", "entropy_S"),
            reads=(
                "old_logprobs_T",
                "ref_logprobs_T",
                "advantages_T",
                "teacher_advantages_T",
                TEACHER_HIDDEN,
                TEACHER_SCORED,
                "weights_T",
                "selection_T",
                "routing_TLK",
                "unrouted_T",
            ),
            loss="mcore_rl.algorithms.policy:policy_loss",
            phase="logprobs",
        ),
        Role(
            name="reference",
            head=Head.lm,
            shares="actor",
            makes=("ref_logprobs_T",),
            moves=Never(),
            phase="reference",
        ),
        Role(
            name="teacher",
            head=Head.lm,
            weights="teacher.path",
            config=TeacherConfig,
            makes=("teacher_logprobs_T",),
            phase="teacher",
        ),
        Role(
            name="critic",
            head=Head.value,
            trains=True,
            weights="critic.path",
            config=CriticConfig,
            makes=("old_values_T",),
            reads=("old_values_T", "returns_T"),
            loss="mcore_rl.algorithms.value:value_loss",
            phase="values",
        ),
        Role(
            name="process_reward",
            head=Head.lm,
            trains=True,
            weights="process_reward.path",
            config=ProcessRewardConfig,
            makes=("process_logprobs_T",),
            copy_makes="process_ref_logprobs_T",
            reads=("process_ref_logprobs_T",),
            on_outcomes=True,
            loss="mcore_rl.algorithms.outcome_loss:outcome_loss",
            phase="process_rewards",
        ),
    )
}
