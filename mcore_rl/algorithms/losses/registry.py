"""Every policy loss by name, what it needs, and where it comes from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mcore_rl.algorithms.losses.cispo import cispo
from mcore_rl.algorithms.losses.gpg import gpg
from mcore_rl.algorithms.losses.gspo import gspo
from mcore_rl.algorithms.losses.policy_gradient import policy_gradient
from mcore_rl.algorithms.losses.ppo_clip import ppo_clip
from mcore_rl.algorithms.losses.token_losses import TokenLosses
from mcore_rl.config.roles import ActorConfig, LossMode
from mcore_rl.types import LossInputs


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """One policy loss.  needs_old: whether it reads the log-probs that the policy had before the step."""

    fn: Callable[[LossInputs, ActorConfig], TokenLosses]
    needs_old: bool
    paper: str


POLICY_LOSSES: dict[LossMode, PolicyLoss] = {
    LossMode.ppo_clip: PolicyLoss(fn=ppo_clip, needs_old=True, paper="arXiv:1707.06347"),
    LossMode.gspo: PolicyLoss(fn=gspo, needs_old=True, paper="arXiv:2507.18071"),
    LossMode.cispo: PolicyLoss(fn=cispo, needs_old=True, paper="arXiv:2506.13585"),
    LossMode.gpg: PolicyLoss(fn=gpg, needs_old=False, paper="arXiv:2504.02546"),
    LossMode.policy_gradient: PolicyLoss(fn=policy_gradient, needs_old=False, paper="doi:10.1007/BF00992696"),
}
