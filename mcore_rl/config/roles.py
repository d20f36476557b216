"""The configuration groups of roles: engine settings, layout, and the settings of training."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from mcore_rl.config.algorithm import KlPenalty
from mcore_rl.config.engine import EngineConfig, engine_violations
from mcore_rl.config.megatron_fields import megatron_violations
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.errors import Violation


class LossAggregation(Enum):
    """How the losses of tokens become one number.

    ``token_mean``: the mean over all trained tokens of the minibatch.  ``seq_mean_token_sum``, ``seq_mean_token_mean``:
    the mean over sequences of the sums or means over their tokens.  ``sum_over_constant``: the sum over all tokens,
    divided by the number of sequences times ``loss_agg_constant`` (arXiv:2503.20783).
    """

    token_mean = "token_mean"
    seq_mean_token_sum = "seq_mean_token_sum"
    seq_mean_token_mean = "seq_mean_token_mean"
    sum_over_constant = "sum_over_constant"


@dataclass(kw_only=True)
class RoleConfig(EngineConfig):
    """The configuration group ``NAME.*`` of a role NAME with processes of its own: engine settings and layout."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def violations(self, key: str) -> list[Violation]:
        """Every violation within the group.  key: the group's name."""
        return [
            Violation(f"{key}.{each.key}", each.value, each.problem, each.remedy.replace(" optim.", f" {key}.optim."))
            for each in engine_violations(self)
        ] + megatron_violations(self.megatron, f"{key}.megatron")


@dataclass(kw_only=True)
class FrozenModelConfig(RoleConfig):
    """A frozen model beside the policy, such as a teacher.  path: its weights; None is the actor's first weights."""

    path: str | None = None


@dataclass(kw_only=True)
class TrainedConfig(RoleConfig):
    """A role that is trained.

    ppo_mini_batch_size: prompts per optimizer step; each has ``rollout.n`` sequences.
    ppo_epochs: passes over the samples of a step.
    shuffle: shuffle the samples before the second and later passes.
    loss_agg_mode, loss_agg_constant: see ``LossAggregation``; None is ``data.max_response_length``.
    """

    ppo_mini_batch_size: int = 256
    ppo_epochs: int = 1
    shuffle: bool = True
    loss_agg_mode: LossAggregation = LossAggregation.token_mean
    loss_agg_constant: float | None = None

    def violations(self, key: str) -> list[Violation]:
        """Every violation within the group, as ``RoleConfig.violations``."""
        violations = super().violations(key)
        for name in ("ppo_mini_batch_size", "ppo_epochs"):
            if getattr(self, name) < 1:
                violations.append(
                    Violation(f"{key}.{name}", getattr(self, name), "must be positive", "Write 1 or more")
                )
        if self.loss_agg_constant is not None and self.loss_agg_constant <= 0:
            remedy = "Write a length in tokens"
            violations.append(Violation(f"{key}.loss_agg_constant", self.loss_agg_constant, "must be positive", remedy))
        return violations


@dataclass(kw_only=True)
class TrainedModelConfig(TrainedConfig):
    """A trained model beside the policy.  path: its first weights; None is the actor's."""

    path: str | None = None


@dataclass(kw_only=True)
class ActorConfig(TrainedConfig):
    """The policy that is trained.

    allow_stale_updates: permit several updates per batch with a loss that has no ratio (``policy_gradient``, ``gpg``).
    All but the first then treat samples of an older policy as samples of the current one.
    loss_mode: the policy loss's name in docs/algorithms.md, or ``FILE.py:NAME`` of a file of your own.
    clip_ratio: the clip range of PPO.
    clip_ratio_low, clip_ratio_high: the ranges below and above 1, if they differ (arXiv:2503.14476); None is
    clip_ratio.  ``geo_mean`` clips the ratio's logarithm by them.
    clip_ratio_c: bound of the dual clip (arXiv:1912.09729), TRL's delta; None is no dual clip.
    tau_pos, tau_neg: temperatures of ``sapo``, for advantages above 0 and for the others.
    clip_cov_ratio: share of tokens that ``clip_cov`` leaves out of the loss.
    clip_cov_lb, clip_cov_ub: the covariances between which it draws them.
    kl_cov_ratio, ppo_kl_coef: share of tokens that ``kl_cov`` penalises for moving, and the penalty's coefficient.
    entropy_coeff: coefficient of the entropy bonus.
    use_kl_loss: add ``kl_loss_coef`` times the KL to the reference, estimated by ``kl_loss_type``, to the loss.
    full_kl_gib: the most host memory that a process takes for the reference's logits of a minibatch, with
    ``kl_loss_type=full``.
    """

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

    def violations(self, key: str) -> list[Violation]:
        """Every violation within the group, as ``RoleConfig.violations``."""
        violations = super().violations(key)
        names = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "entropy_coeff", "kl_loss_coef", "full_kl_gib")
        for name in (*names, "ppo_kl_coef"):
            value = getattr(self, name)
            if value is not None and value < 0:
                violations.append(Violation(f"{key}.{name}", value, "must not be negative", "Write 0 or more"))
        for name in ("tau_pos", "tau_neg"):
            if getattr(self, name) <= 0:
                violations.append(Violation(f"{key}.{name}", getattr(self, name), "must be positive", "Write 1.0, say"))
        for name in ("clip_cov_ratio", "kl_cov_ratio"):
            if not 0 < getattr(self, name) <= 1:
                problem = "is a share of the tokens, and must lie in (0, 1]"
                violations.append(Violation(f"{key}.{name}", getattr(self, name), problem, "Write 0.0002, say"))
        if self.clip_cov_lb >= self.clip_cov_ub:
            problem = f"leaves no covariance below clip_cov_ub={self.clip_cov_ub:g}"
            violations.append(
                Violation(f"{key}.clip_cov_lb", self.clip_cov_lb, problem, "Write 1.0, and clip_cov_ub=5.0")
            )
        return violations


@dataclass(kw_only=True)
class CriticConfig(TrainedModelConfig):
    """The value model of PPO: a worker group of its own, in a layout of its own.

    The value head starts at 0.

    cliprange_value: the value loss clips values to within this distance of the old ones; 0 is no clipping.
    """

    cliprange_value: float = 0.5

    def violations(self, key: str) -> list[Violation]:
        """Every violation within the group, as ``RoleConfig.violations``."""
        violations = super().violations(key)
        if self.cliprange_value < 0:
            remedy = "Write 0.5, or 0 for no clipping"
            violations.append(Violation(f"{key}.cliprange_value", self.cliprange_value, "must not be negative", remedy))
        return violations
