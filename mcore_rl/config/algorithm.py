"""The algorithm as a user writes it: advantages, KL, and what is done about samples that carry no signal."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from mcore_rl.errors import Violation


class KlPenalty(Enum):
    """KL(policy || reference) at one token: estimates from the token drawn (http://joschu.net/blog/kl-approx.html).

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


class KlControl(Enum):
    """``adaptive`` moves the coefficient so that the KL comes to ``target_kl`` (arXiv:1909.08593, section 2.2)."""

    fixed = "fixed"
    adaptive = "adaptive"


class KlUnit(Enum):
    """Over what the KL is a mean that is held against ``target_kl``.

    ``token``: of each response the mean over its tokens, then the mean over responses, as in verl.  ``response``: of
    each response the sum over its tokens, as in the paper (arXiv:1909.08593).
    """

    token = "token"
    response = "response"


@dataclass(kw_only=True)
class KlControlConfig:
    """Coefficient of the KL in the reward.

    target_kl: nats, per ``target_kl_per``.  horizon: samples.  These three are read by ``adaptive`` only.
    """

    type: KlControl = KlControl.fixed
    kl_coef: float = 0.001
    target_kl: float = 0.1
    target_kl_per: KlUnit = KlUnit.token
    horizon: int = 10000


class CorrectionLevel(Enum):
    """Over what the ratio between trainer and sampler is taken: each token by itself, or the whole response."""

    none = "none"
    token = "token"
    sequence = "sequence"


class CorrectionMode(Enum):
    """What happens to a ratio outside of its bounds.

    ``truncate``: the ratio weighs the loss, at most ``upper`` (arXiv:1802.01561).  ``zero``: its weight is 0, and it
    still counts in the loss's divisor: IcePop (arXiv:2510.18855).  ``mask``: it is not trained, and does not count.
    """

    truncate = "truncate"
    zero = "zero"
    mask = "mask"


class Rejection(Enum):
    """By what tokens or whole responses are rejected, whatever their weights; the names are verl's ``rollout_rs``.

    k1, k2, k3: of a token, ``log r``, ``(log r)^2 / 2`` and ``r - 1 - log r``, with ``r = p_trainer / p_sampler``.
    ``token_*`` rejects tokens; the others whole responses, by the sum, mean or largest of their tokens.
    ``seq_mean_k1`` is the geometric mean of the ratios.
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
        """Whether its bounds are of a ratio, from below and above; else they are nats, from above."""
        return self in (Rejection.token_k1, Rejection.seq_sum_k1, Rejection.seq_mean_k1)


@dataclass(kw_only=True)
class RolloutCorrectionConfig:
    """Importance correction for what sampler and trainer compute differently.

    level, mode, upper, lower: of the weights; lower is not read by ``truncate``.  batch_normalize: weights are divided
    by their mean over the step.  reject: ``reject_upper`` must be given, the largest ratio (k1) or nats (k2, k3) that
    are trained; ``reject_lower``, k1 only, is ``1 / reject_upper`` where it is None.  bypass_mode: the loss's ratio is
    that of the policy to the sampler, and not to the policy before the step.
    """

    level: CorrectionLevel = CorrectionLevel.none
    mode: CorrectionMode = CorrectionMode.truncate
    upper: float = 2.0
    lower: float = 0.5
    batch_normalize: bool = False
    reject: Rejection = Rejection.none
    reject_upper: float | None = None
    reject_lower: float | None = None
    bypass_mode: bool = False

    @property
    def reads_ratio(self) -> tuple[str, object] | None:
        """The first key, and its value, that makes training depend on how trainer and sampler differ; None of none."""
        if self.level is not CorrectionLevel.none:
            return "level", self.level.value
        if self.reject is not Rejection.none:
            return "reject", self.reject.value
        return ("bypass_mode", True) if self.bypass_mode else None


class FilterMetric(Enum):
    """``acc``: whether the answer is right; where the grader does not say, ``score``: what the response earned.

    Neither has the overlong penalty in it.
    """

    acc = "acc"
    score = "score"


@dataclass(kw_only=True)
class FilterGroupsConfig:
    """Dynamic sampling (arXiv:2503.14476, section 3.2): groups without a signal make room for fresh prompts.

    metric: what must differ within a group.  max_num_gen_batches: batches of prompts drawn for one step, after which
    what is there is trained.
    """

    enable: bool = False
    metric: FilterMetric = FilterMetric.acc
    max_num_gen_batches: int = 10


@dataclass(kw_only=True)
class AlgorithmConfig:
    """Advantages and KL.

    adv_estimator: how advantages follow from rewards, by its name in docs/algorithms.md; ``FILE.py:NAME`` is one of a
    file of your own.
    gamma, lam: discount, and GAE's lambda.
    whiten_advantages: to mean 0 and variance 1 over the trained tokens of the whole batch.
    use_kl_in_reward: ``- kl_ctrl.kl_coef * kl_penalty`` is added to every token's reward.
    mask_truncated: responses cut off at their limit are not trained (arXiv:2503.14476, overlong filtering).
    masked_in_baseline: their scores stay in the mean and deviation of their group, as in that paper, which masks their
    loss; false: they leave their group.
    gdpo_reward_keys: of ``gdpo``, parts of the reward as the grader names them, ``acc`` (whether the answer is right)
    or ``score`` (the whole); gdpo_reward_weights: of each, None is 1 for all.
    """

    adv_estimator: str = "grpo"
    gamma: float = 1.0
    lam: float = 1.0
    whiten_advantages: bool = False
    use_kl_in_reward: bool = False
    kl_penalty: KlPenalty = KlPenalty.k1
    kl_ctrl: KlControlConfig = field(default_factory=KlControlConfig)
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    mask_truncated: bool = False
    masked_in_baseline: bool = True
    gdpo_reward_keys: list[str] = field(default_factory=list)
    gdpo_reward_weights: list[float] | None = None


def algorithm_violations(algorithm: AlgorithmConfig) -> list[Violation]:
    """Everything wrong in ``algorithm`` by itself."""
    found = []
    for name in ("gamma", "lam"):
        value = getattr(algorithm, name)
        if not 0 <= value <= 1:
            found.append(Violation(f"algorithm.{name}", value, "must lie in [0, 1]", "Write 1.0, or a little less"))
    control = algorithm.kl_ctrl
    for name in ("kl_coef", "target_kl"):
        value = getattr(control, name)
        if value < 0:
            found.append(Violation(f"algorithm.kl_ctrl.{name}", value, "must not be negative", "Write 0 or more"))
    if control.type is KlControl.adaptive and not (control.target_kl > 0 and control.horizon > 0):
        remedy = "Write a positive target_kl and horizon, or type=fixed"
        problem = f"an adaptive controller divides by target_kl={control.target_kl} and horizon={control.horizon}"
        found.append(Violation("algorithm.kl_ctrl.type", control.type.value, problem, remedy))
    found += _penalty_violations(algorithm.kl_penalty)
    found += _correction_violations(algorithm.rollout_correction)
    attempts = algorithm.filter_groups.max_num_gen_batches
    if attempts < 1:
        key = "algorithm.filter_groups.max_num_gen_batches"
        found.append(Violation(key, attempts, "must be positive", "Write 1 or more"))
    return found


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


def _correction_violations(correction: RolloutCorrectionConfig) -> list[Violation]:
    found, key = [], "algorithm.rollout_correction"
    if not 0 <= correction.lower <= 1 <= correction.upper:
        problem = f"with upper={correction.upper} does not enclose a ratio of 1"
        found.append(Violation(f"{key}.lower", correction.lower, problem, "Write lower <= 1 <= upper"))
    weighs = correction.level is not CorrectionLevel.none
    if correction.bypass_mode and weighs:
        problem = f"with level={correction.level.value} corrects twice: the loss's ratio is that to the sampler already"
        found.append(Violation(f"{key}.bypass_mode", True, problem, "Write level=none, or bypass_mode=false"))
    return found + _rejection_violations(correction, key)


def _rejection_violations(correction: RolloutCorrectionConfig, key: str) -> list[Violation]:
    reject, upper, lower = correction.reject, correction.reject_upper, correction.reject_lower
    if reject is Rejection.none:
        return []
    found = []
    if upper is None or not (upper >= 1 if reject.bounds_ratio else upper > 0):
        problem = "must be 1 or more, a ratio" if reject.bounds_ratio else "must be positive, nats"
        remedy = "Write 1.001, say" if reject.bounds_ratio else "Write 0.01, say"
        found.append(Violation(f"{key}.reject_upper", upper, f"{problem}, with reject={reject.value}", remedy))
    if reject.bounds_ratio and lower is not None and not 0 < lower <= 1:
        found.append(Violation(f"{key}.reject_lower", lower, "must lie in (0, 1]", "Leave it out: 1 / reject_upper"))
    return found
