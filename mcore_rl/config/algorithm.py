"""The configuration group ``algorithm``: advantages, KL, rollout correction, and the filter of groups."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated

from mcore_rl.config.bounds import (
    CrossCheck,
    Interval,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Share,
    check,
)
from mcore_rl.ground.errors import Violation


class KlPenalty(Enum):
    """How KL(policy || reference) is estimated at a token, from the token drawn (http://joschu.net/blog/kl-approx.html).

    ``low_var_kl``: verl's k3, whose value is at most 10, and whose gradient is 0 beyond that.  ``k1_plus``,
    ``k3_plus``: the value of k1 or k3 with the gradient of k2; in the actor's loss only (verl's ``k1+``, ``k3+``).
    ``full``: the exact sum over the vocabulary, in the actor's loss only (training/full_kl.py).
    """

    k1 = "k1"
    k2 = "k2"
    k3 = "k3"
    low_var_kl = "low_var_kl"
    k1_plus = "k1_plus"
    k3_plus = "k3_plus"
    full = "full"


class Divergence(Enum):
    """How far the policy is from its teacher at a token: p is the policy's distribution, q the teacher's.

    ``drawn``: ``log p - log q`` of the token drawn, an estimate of KL(p || q), in the advantages.  The others are sums
    over the vocabulary, and terms of the policy's loss (arXiv:2306.13649).  ``reverse_kl``: KL(p || q).
    ``forward_kl``: KL(q || p).  ``jensen_shannon``: ``beta KL(q || m) + (1 - beta) KL(p || m)``, where ``m = beta q +
    (1 - beta) p``, as in TRL's GKDTrainer.
    """

    drawn = "drawn"
    reverse_kl = "reverse_kl"
    forward_kl = "forward_kl"
    jensen_shannon = "jensen_shannon"


class KlControl(Enum):
    """``adaptive`` moves the coefficient so that the KL comes to ``target_kl`` (arXiv:1909.08593, section 2.2)."""

    fixed = "fixed"
    adaptive = "adaptive"


class KlUnit(Enum):
    """The unit in which the measured KL is compared with ``target_kl``; both are means over responses.

    ``token``: first the mean over the tokens of each response, as in verl.  ``response``: first the sum over the tokens
    of each response, as in the paper (arXiv:1909.08593).
    """

    token = "token"
    response = "response"


@dataclass(kw_only=True)
class KlControlConfig:
    """The coefficient of the KL in the reward.

    kl_coef: the coefficient, with ``adaptive`` that of the first step.
    target_kl: the KL that ``adaptive`` aims at, nats per ``target_kl_per``.
    horizon: samples over which ``adaptive`` spreads a change of the coefficient.
    """

    type: KlControl = KlControl.fixed
    kl_coef: NonNegativeFloat = 0.001
    target_kl: NonNegativeFloat = 0.1
    target_kl_per: KlUnit = KlUnit.token
    horizon: PositiveInt = 10000


class OffPolicy(Enum):
    """What takes care of samples that the policy before the step (``old``) did not draw, but the sampler (``mu``) did.

    ``recompute``: the loss's ratio is ``pi / old``, and the difference of ``old`` and ``mu`` is measured alone.
    ``bypass``: ``mu`` stands for ``old`` wherever it is read, so the ratio is ``pi / mu``, and the pass that computes
    ``old`` is left out.  ``decoupled``: the ratio is ``pi / old``, and ``old / mu`` weighs each token's loss, without
    gradient (arXiv:2110.00641, section 2; arXiv:2505.24298, section 5.2).
    """

    recompute = "recompute"
    bypass = "bypass"
    decoupled = "decoupled"


class CorrectionLevel(Enum):
    """Of what there is one weight ``old / mu``.

    ``token``: of each token.  ``sequence``: of each response, the product over its tokens.  ``geometric``: of each
    response, the geometric mean over its tokens.
    """

    token = "token"
    sequence = "sequence"
    geometric = "geometric"


class CorrectionMode(Enum):
    """What happens to a token or response whose ratio is outside the bounds; within them, the ratio weighs its loss.

    ``truncate``: it is weighted by ``upper`` at most (arXiv:1802.01561).  ``zero``: its weight is 0, but the loss's
    divisor still counts it: IcePop (arXiv:2510.18855).  ``mask``: it is not trained, and the divisor does not count it.
    """

    truncate = "truncate"
    zero = "zero"
    mask = "mask"


class Rejection(Enum):
    """The measure by which tokens or whole responses are rejected; the names are verl's ``rollout_rs``.

    k1, k2, k3: of a token, ``log r``, ``(log r)^2 / 2`` and ``r - 1 - log r``, with ``r = old / mu``.
    ``token_*`` rejects tokens; the others reject whole responses, by the sum, mean or largest value of their tokens.
    ``seq_mean_k1`` is the geometric mean of the ratios.  Rejection does not depend on the correction's weights.
    """

    none = "none"
    token_k1 = "token_k1"
    token_k2 = "token_k2"
    token_k3 = "token_k3"
    seq_sum_k1 = "seq_sum_k1"
    seq_sum_k2 = "seq_sum_k2"
    seq_sum_k3 = "seq_sum_k3"
    seq_mean_k1 = "seq_mean_k1"
    seq_mean_k2 = "seq_mean_k2"
    seq_mean_k3 = "seq_mean_k3"
    seq_max_k2 = "seq_max_k2"
    seq_max_k3 = "seq_max_k3"

    @property
    def bounds_ratio(self) -> bool:
        """True if the bounds are ratios, a lower and an upper; False if there is one upper bound, in nats."""
        return self in (Rejection.token_k1, Rejection.seq_sum_k1, Rejection.seq_mean_k1)


@dataclass(kw_only=True)
class RolloutCorrectionConfig:
    """What follows from the ratio ``old / mu`` of trainer to sampler.

    level, mode, upper, lower: how weights follow from ratios; ``truncate`` does not read lower.
    batch_normalize: weights are divided by their mean over the step.
    reject: the measure of rejection.
    reject_upper: the largest ratio (k1) or nats (k2, k3) that is still trained; ``reject`` requires it.
    reject_lower: the smallest ratio that is still trained, k1 only; None is ``1 / reject_upper``.
    """

    level: CorrectionLevel = CorrectionLevel.token
    mode: CorrectionMode = CorrectionMode.truncate
    upper: Annotated[float, Interval("[1, inf)")] = 2.0
    lower: Share = 0.5
    batch_normalize: bool = False
    reject: Rejection = Rejection.none
    reject_upper: PositiveFloat | None = None
    reject_lower: PositiveFloat | None = None


class FilterMetric(Enum):
    """What the filter of groups compares, without the overlong penalty.

    ``acc``: whether the answer is right, or ``score`` if the grader does not say.  ``score``: what the grader gave.
    """

    acc = "acc"
    score = "score"


@dataclass(kw_only=True)
class FilterGroupsConfig:
    """Dynamic sampling (arXiv:2503.14476, section 3.2): fresh prompts replace groups without a signal.

    enable: whether groups are filtered.
    metric: what must differ within a group.
    lower, upper: the bounds of its mean over the group, themselves allowed, beyond which the prompt is too hard or too
    easy (arXiv:2502.01456, online prompt filtering); None is no bound.
    max_num_gen_batches: batches of prompts that are sampled for one step at
    most; then the step trains the groups that it has.
    """

    enable: bool = False
    metric: FilterMetric = FilterMetric.acc
    lower: float | None = None
    upper: float | None = None
    max_num_gen_batches: PositiveInt = 10


@dataclass(kw_only=True)
class DistillConfig:
    """On-policy distillation: the policy learns from a frozen teacher, ``teacher.*``, on samples of its own.

    coef: with ``divergence=drawn``, ``coef * (log p_teacher - log p_policy)`` of the token drawn is added to its
    advantage; else ``coef`` times the divergence is added to its loss.  0: there is no teacher (arXiv:2306.08543,
    2306.13649).
    jsd_beta: for ``divergence=jensen_shannon``: the teacher's share of the mixture; towards 0 it is a forward KL,
    towards 1 a reverse KL.
    """

    coef: NonNegativeFloat = 0.0
    divergence: Divergence = Divergence.drawn
    jsd_beta: Annotated[float, Interval("(0, 1)")] = 0.5

    @property
    def in_advantages(self) -> bool:
        """Whether the teacher is a part of the advantages."""
        return self.coef > 0 and self.divergence is Divergence.drawn

    @property
    def in_loss(self) -> bool:
        """Whether the teacher is a term of the policy's loss, over the whole vocabulary."""
        return self.coef > 0 and self.divergence is not Divergence.drawn


@dataclass(kw_only=True)
class AlgorithmConfig:
    """Advantages, KL, and samples that another policy drew.  The file of an estimator adds its own settings.

    adv_estimator: the estimator's name in docs/algorithms.md, or ``FILE.py:NAME`` of a file of your own.
    whiten_advantages: advantages get mean 0 and variance 1 over the trained tokens of the whole batch.
    use_kl_in_reward: ``- kl_ctrl.kl_coef * kl_penalty`` is added to every token's reward.
    off_policy: whose log-probs the ratio of the policy loss is taken to, and whether ``rollout_correction`` weighs it.
    mask_truncated: responses cut off at their limit are not trained (arXiv:2503.14476, overlong filtering).
    masked_in_baseline: their scores stay in the mean and deviation of their group, as in that paper, which masks their
    loss; false: they leave their group.
    ref_update_freq: the reference becomes the policy after every so many steps; 0: it stays the policy of the start.
    """

    adv_estimator: str = "grpo"
    whiten_advantages: bool = False
    use_kl_in_reward: bool = False
    kl_penalty: KlPenalty = KlPenalty.k1
    kl_ctrl: KlControlConfig = field(default_factory=KlControlConfig)
    off_policy: OffPolicy = OffPolicy.recompute
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    mask_truncated: bool = False
    masked_in_baseline: bool = True
    ref_update_freq: NonNegativeInt = 0

    @property
    def reward_parts(self) -> list[str]:
        """The parts of the reward that the estimator reads, as the grader names them."""
        return []

    @property
    def reads_sampler(self) -> tuple[str, object] | None:
        """(key, value) of the first setting that trains with the sampler's log-probs; None if no setting does."""
        if self.off_policy is not OffPolicy.recompute:
            return "off_policy", self.off_policy.value
        reject = self.rollout_correction.reject
        return None if reject is Rejection.none else ("rollout_correction.reject", reject.value)

    @property
    def weighs(self) -> bool:
        """Whether the ratio of trainer to sampler weighs the policy loss."""
        return self.off_policy is OffPolicy.decoupled


def algorithm_violations(algorithm: AlgorithmConfig) -> list[Violation]:
    """Every violation within ``algorithm``, not looking at other groups."""
    key = "algorithm.rollout_correction"
    rules: list[CrossCheck[AlgorithmConfig]] = [
        _control_violations,
        lambda each: _bound_violations(each.filter_groups),
        lambda each: _penalty_violations(each.kl_penalty),
        lambda each: _rejection_violations(each.rollout_correction, key),
    ]
    return check(algorithm, rules, "algorithm.")


def _control_violations(algorithm: AlgorithmConfig) -> list[Violation]:
    control = algorithm.kl_ctrl
    if control.type is KlControl.fixed or control.target_kl > 0:
        return []
    remedy = "Write a positive target_kl, or type=fixed"
    problem = f"an adaptive controller divides by target_kl={control.target_kl}"
    return [Violation("algorithm.kl_ctrl.type", control.type.value, problem, remedy)]


def _bound_violations(filtering: FilterGroupsConfig) -> list[Violation]:
    lower = filtering.lower
    upper = filtering.upper
    if lower is None or upper is None or lower <= upper:
        return []
    problem = f"exceeds upper={upper:g}: no group would be trained"
    return [Violation("algorithm.filter_groups.lower", lower, problem, "Write lower=0.2 upper=0.8, say")]


def _penalty_violations(kind: KlPenalty) -> list[Violation]:
    if kind is KlPenalty.full:
        problem = "rewards are of the tokens that were drawn, and this is a sum over all that might have been"
        remedy = "Write k1 or k3, or have it in the loss: actor.use_kl_loss=true actor.kl_loss_type=full"
    elif kind in (KlPenalty.k1_plus, KlPenalty.k3_plus):
        problem = "differs in its gradient alone, and a reward has none"
        remedy = f"Write {kind.value.removesuffix('_plus')}, or have it in the loss: actor.kl_loss_type={kind.value}"
    else:
        return []
    return [Violation("algorithm.kl_penalty", kind.value, problem, remedy)]


def _rejection_violations(correction: RolloutCorrectionConfig, key: str) -> list[Violation]:
    reject = correction.reject
    upper = correction.reject_upper
    lower = correction.reject_lower
    if reject is Rejection.none:
        return []
    violations = []
    if upper is None or not (upper >= 1 if reject.bounds_ratio else upper > 0):
        problem = "must be 1 or more, a ratio" if reject.bounds_ratio else "must be positive, nats"
        remedy = f"Write {_bound_for(reject)}, say"
        violations.append(Violation(f"{key}.reject_upper", upper, f"{problem}, with reject={reject.value}", remedy))
    if reject.bounds_ratio and lower is not None and not 0 < lower <= 1:
        violations.append(
            Violation(f"{key}.reject_lower", lower, "must lie in (0, 1]", "Leave it out: 1 / reject_upper")
        )
    return violations


def _bound_for(reject: Rejection) -> str:
    """A ``reject_upper`` that rejects little while sampler and trainer agree but for their kernels."""
    if reject.bounds_ratio:
        return "1.01" if reject is Rejection.seq_mean_k1 else "2"
    return "1" if reject.value.startswith(("seq_sum", "seq_max")) else "0.01"
