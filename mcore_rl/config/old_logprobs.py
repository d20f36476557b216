"""Decides whether a step runs the policy's log-prob pass, or takes old log-probs from the forward of its only update.

Old log-probs are those of the weights before the step.  Where a step takes one update of the whole batch, its forward
pass has these weights: its own log-probs, detached, are the old ones, bit for bit, and a pass of their own is left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mcore_rl.config.algorithm import CorrectionLevel, Rejection
from mcore_rl.config.algorithm_registry import policy_loss

if TYPE_CHECKING:
    from mcore_rl.config.run import RunConfig


def why_scored(run: RunConfig) -> str | None:
    """Why each step of ``run`` scores its samples with the policy before the update; None: the update does so itself.

    The policy's loss may read old log-probs, and metrics may; anything else that reads them, or a second update, needs
    the pass.
    """
    policy, config, correction = run.policy, run.trained_config(run.policy), run.algorithm.rollout_correction
    others = [role for role in run.role_rows if role is not policy]
    reasons = {
        "a step has several updates": config.ppo_epochs > 1 or config.ppo_mini_batch_size < run.data.train_batch_size,
        "the KL is in the reward": run.algorithm.use_kl_in_reward,
        "rollout_correction reads the ratio of trainer to sampler": correction.level is not CorrectionLevel.none
        or correction.reject is not Rejection.none,
        "the loss selects tokens of the whole step": policy_loss(run.actor.loss_mode).selection is not None,
        "truncated responses are measured, but not trained": run.algorithm.mask_truncated,
        "another role reads them": any(set(policy.makes) & set(role.reads) for role in others) or bool(policy.read_by),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
