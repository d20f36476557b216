"""Every policy loss by name, what it needs, and where it comes from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from mcore_rl.algorithms.losses.cispo import cispo
from mcore_rl.algorithms.losses.clip_cov import clip_cov, clip_cov_keys
from mcore_rl.algorithms.losses.geo_mean import geo_mean
from mcore_rl.algorithms.losses.gpg import gpg
from mcore_rl.algorithms.losses.gspo import gspo
from mcore_rl.algorithms.losses.kl_cov import kl_cov, kl_cov_keys
from mcore_rl.algorithms.losses.policy_gradient import policy_gradient
from mcore_rl.algorithms.losses.ppo_clip import ppo_clip
from mcore_rl.algorithms.losses.sapo import sapo
from mcore_rl.algorithms.losses.token_losses import TokenLosses
from mcore_rl.config.roles import ActorConfig, LossMode
from mcore_rl.types import LossInputs


@dataclass(frozen=True, kw_only=True)
class Selects:
    """Which tokens of a step a loss treats apart: those with the largest keys (``algorithms/selection.py``).

    keys: of tokens, from their covariance and a uniform draw.  share: of all trained tokens, how many.
    """

    keys: Callable[[Tensor, Tensor, ActorConfig], Tensor]
    share: Callable[[ActorConfig], float]


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """One policy loss.

    needs_old: whether it reads the log-probs that the policy had before the step.  selects: tokens that are chosen
    over the whole step; None of a loss that treats all alike.
    """

    fn: Callable[[LossInputs, ActorConfig], TokenLosses]
    needs_old: bool
    paper: str
    selects: Selects | None = None


POLICY_LOSSES: dict[LossMode, PolicyLoss] = {
    LossMode.ppo_clip: PolicyLoss(fn=ppo_clip, needs_old=True, paper="arXiv:1707.06347"),
    LossMode.gspo: PolicyLoss(fn=gspo, needs_old=True, paper="arXiv:2507.18071"),
    LossMode.geo_mean: PolicyLoss(fn=geo_mean, needs_old=True, paper="arXiv:2507.20673"),
    LossMode.sapo: PolicyLoss(fn=sapo, needs_old=True, paper="arXiv:2511.20347"),
    LossMode.cispo: PolicyLoss(fn=cispo, needs_old=True, paper="arXiv:2506.13585"),
    LossMode.clip_cov: PolicyLoss(
        fn=clip_cov,
        needs_old=True,
        paper="arXiv:2505.22617",
        selects=Selects(keys=clip_cov_keys, share=lambda config: config.clip_cov_ratio),
    ),
    LossMode.kl_cov: PolicyLoss(
        fn=kl_cov,
        needs_old=True,
        paper="arXiv:2505.22617",
        selects=Selects(keys=kl_cov_keys, share=lambda config: config.kl_cov_ratio),
    ),
    LossMode.gpg: PolicyLoss(fn=gpg, needs_old=False, paper="arXiv:2504.02546"),
    LossMode.policy_gradient: PolicyLoss(fn=policy_gradient, needs_old=False, paper="doi:10.1007/BF00992696"),
}
