"""Decides whether a step runs the policy's log-prob pass.

Old log-probs are those of the weights before the step.  Where a step takes one update of the whole batch, its forward
pass has these weights: its own log-probs, detached, are the old ones, bit for bit, and a pass of their own is left out.
With ``algorithm.off_policy=bypass`` the sampler's stand for them, however many updates there are; then the forward pass
of the first minibatch says how trainer and sampler differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mcore_rl.config.algorithm import OffPolicy, Rejection
from mcore_rl.config.algorithm_registry import policy_loss

if TYPE_CHECKING:
    from mcore_rl.config.run import RunConfig


def why_scored(run: RunConfig) -> str | None:
    """Why each step of ``run`` scores its samples with the policy before the update; None: it does not.

    The policy's loss may read old log-probs, and metrics may; anything else that reads them, or a second update, needs
    the pass.
    """
    policy, config, algorithm = run.policy, run.trained_config(run.policy), run.algorithm
    if algorithm.rollout_correction.reject is not Rejection.none:
        return "rollout_correction.reject reads the ratio of trainer to sampler"
    if algorithm.off_policy is OffPolicy.bypass:
        return None
    others = [role for role in run.role_rows if role.name != policy.name]
    reasons = {
        "a step has several updates": config.ppo_epochs > 1 or config.ppo_mini_batch_size < run.data.train_batch_size,
        "the KL is in the reward": algorithm.use_kl_in_reward,
        "the teacher is compared with them": algorithm.distill.in_advantages,
        "the ratio of trainer to sampler weighs the loss": algorithm.weighs,
        "the loss selects tokens of the whole step": policy_loss(run.actor.loss_mode).selection is not None,
        "truncated responses are measured, but not trained": algorithm.mask_truncated,
        "another role reads them": any(set(policy.makes) & set(role.reads) for role in others) or bool(policy.read_by),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
