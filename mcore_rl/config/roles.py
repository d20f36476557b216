"""The roles that are trained, as a user writes them: the actor with its loss, the critic with its."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from mcore_rl.config.algorithm import KlPenalty
from mcore_rl.config.engine import EngineConfig, engine_violations
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.errors import Violation


class LossAggregation(Enum):
    """How the losses of tokens become one number.

    ``token_mean``: over all trained tokens of the minibatch.  ``seq_mean_token_sum``, ``seq_mean_token_mean``: over
    sequences, of sums or means over their tokens.  ``sum_over_constant``: their sum, divided by the number of sequences
    times ``loss_agg_constant`` (arXiv:2503.20783).
    """

    token_mean = "token_mean"
    seq_mean_token_sum = "seq_mean_token_sum"
    seq_mean_token_mean = "seq_mean_token_mean"
    sum_over_constant = "sum_over_constant"


@dataclass(kw_only=True)
class ActorConfig(EngineConfig):
    """The policy that is trained; engine settings, layout, and loss.

    ppo_mini_batch_size: prompts of one optimizer step; each brings ``rollout.n`` sequences.
    ppo_epochs: passes over the samples of a step.
    shuffle: minibatches of the second and later passes are drawn anew.
    allow_stale_updates: several updates of a batch with a loss that has no ratio (``policy_gradient``, ``gpg``).  All
    but the first then take samples of an older policy for samples of the current one.
    loss_mode: the policy loss, by its name in docs/algorithms.md; ``FILE.py:NAME`` is one of a file of your own.
    clip_ratio: of PPO.  clip_ratio_low, clip_ratio_high: where they differ (arXiv:2503.14476); None is clip_ratio.
    Those of ``geo_mean`` are of the ratio's logarithm.
    clip_ratio_c: bound of the dual clip (arXiv:1912.09729), TRL's delta; None is no dual clip.
    tau_pos, tau_neg: temperatures of ``sapo``, for advantages above 0 and for the others.
    clip_cov_ratio, clip_cov_lb, clip_cov_ub: share of tokens that ``clip_cov`` leaves out, and the covariances between
    which it draws them.
    kl_cov_ratio, ppo_kl_coef: share of tokens that ``kl_cov`` lets pay for moving, and how much.
    loss_agg_mode, loss_agg_constant: see ``LossAggregation``; None is ``data.max_response_length``.
    entropy_coeff: of the bonus.
    use_kl_loss: ``kl_loss_coef * kl_loss_type`` to the reference is added to the loss.
    full_kl_gib: host memory that a process may take for the reference's logits of a minibatch, with
    ``kl_loss_type=full``.
    """

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    ppo_mini_batch_size: int = 256
    ppo_epochs: int = 1
    shuffle: bool = True
    allow_stale_updates: bool = False
    loss_mode: str = "ppo_clip"
    clip_ratio: float = 0.2
    clip_ratio_low: float | None = None
    clip_ratio_high: float | None = None
    clip_ratio_c: float | None = 3.0
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    clip_cov_ratio: float = 0.0002
    clip_cov_lb: float = 1.0
    clip_cov_ub: float = 5.0
    kl_cov_ratio: float = 0.0002
    ppo_kl_coef: float = 1.0
    loss_agg_mode: LossAggregation = LossAggregation.token_mean
    loss_agg_constant: float | None = None
    entropy_coeff: float = 0.0
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.001
    kl_loss_type: KlPenalty = KlPenalty.k3
    full_kl_gib: float = 8.0

    @property
    def clip_low(self) -> float:
        """The clip range below 1."""
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def clip_high(self) -> float:
        """The clip range above 1."""
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high


@dataclass(kw_only=True)
class CriticConfig(EngineConfig):
    """The value model of PPO: a worker group of its own, in a layout of its own.

    path: of its first weights; None is the actor's.  The value head starts at 0.  ppo_mini_batch_size, ppo_epochs: as
    the actor's.  cliprange_value: values move no further than this from the old ones in one step's loss; 0 is no limit.
    loss_agg_mode: as the actor's.
    """

    path: str | None = None
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    ppo_mini_batch_size: int = 256
    ppo_epochs: int = 1
    shuffle: bool = True
    cliprange_value: float = 0.5
    loss_agg_mode: LossAggregation = LossAggregation.token_mean
    loss_agg_constant: float | None = None


def actor_violations(actor: ActorConfig) -> list[Violation]:
    """Everything wrong in ``actor`` by itself."""
    found = _role_violations(actor, "actor")
    names = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "entropy_coeff", "kl_loss_coef", "full_kl_gib")
    for name in (*names, "ppo_kl_coef"):
        value = getattr(actor, name)
        if value is not None and value < 0:
            found.append(Violation(f"actor.{name}", value, "must not be negative", "Write 0 or more"))
    for name in ("tau_pos", "tau_neg"):
        if getattr(actor, name) <= 0:
            found.append(Violation(f"actor.{name}", getattr(actor, name), "must be positive", "Write 1.0, say"))
    for name in ("clip_cov_ratio", "kl_cov_ratio"):
        if not 0 < getattr(actor, name) <= 1:
            problem = "is a share of the tokens, and must lie in (0, 1]"
            found.append(Violation(f"actor.{name}", getattr(actor, name), problem, "Write 0.0002, say"))
    if actor.clip_cov_lb >= actor.clip_cov_ub:
        problem = f"leaves no covariance below clip_cov_ub={actor.clip_cov_ub:g}"
        found.append(Violation("actor.clip_cov_lb", actor.clip_cov_lb, problem, "Write 1.0, and clip_cov_ub=5.0"))
    return found


def critic_violations(critic: CriticConfig) -> list[Violation]:
    """Everything wrong in ``critic`` by itself."""
    found = _role_violations(critic, "critic")
    if critic.cliprange_value < 0:
        remedy = "Write 0.5, or 0 for no clipping"
        found.append(Violation("critic.cliprange_value", critic.cliprange_value, "must not be negative", remedy))
    return found


def _role_violations(role: ActorConfig | CriticConfig, key: str) -> list[Violation]:
    found = [
        Violation(f"{key}.{each.key}", each.value, each.problem, each.remedy.replace(" optim.", f" {key}.optim."))
        for each in engine_violations(role)
    ]
    for name in ("ppo_mini_batch_size", "ppo_epochs"):
        if getattr(role, name) < 1:
            found.append(Violation(f"{key}.{name}", getattr(role, name), "must be positive", "Write 1 or more"))
    constant = role.loss_agg_constant
    if constant is not None and constant <= 0:
        found.append(Violation(f"{key}.loss_agg_constant", constant, "must be positive", "Write a length in tokens"))
    return found
