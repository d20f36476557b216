"""The algorithm as a user writes it: advantages, KL, and what is done about samples that carry no signal."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from mcore_rl.errors import Violation


class KlPenalty(Enum):
    """KL(policy || reference) at one token: estimates from the token drawn (http://joschu.net/blog/kl-approx.html).

    ``full``: the exact sum over the vocabulary, in the actor's loss only (training/full_kl.py).
    """

    k1 = "k1"
    k2 = "k2"
    k3 = "k3"
    full = "full"


class KlControl(Enum):
    """``adaptive`` moves the coefficient so that the KL comes to ``target_kl`` (arXiv:1909.08593, section 2.2)."""

    fixed = "fixed"
    adaptive = "adaptive"


@dataclass(kw_only=True)
class KlControlConfig:
    """Coefficient of the KL in the reward.  target_kl: nats per response.  horizon: samples; adaptive only."""

    type: KlControl = KlControl.fixed
    kl_coef: float = 0.001
    target_kl: float = 0.1
    horizon: int = 10000


class CorrectionLevel(Enum):
    """Over what the ratio between trainer and sampler is taken: each token by itself, or the whole response."""

    none = "none"
    token = "token"
    sequence = "sequence"


class CorrectionMode(Enum):
    """``truncate``: the ratio weighs the loss, at most ``upper``.  ``mask``: outside the bounds nothing is trained."""

    truncate = "truncate"
    mask = "mask"


@dataclass(kw_only=True)
class RolloutCorrectionConfig:
    """Importance correction for what sampler and trainer compute differently (arXiv:1802.01561; TIS and MIS).

    upper: of the ratio.  lower: masking only.
    """

    level: CorrectionLevel = CorrectionLevel.none
    mode: CorrectionMode = CorrectionMode.truncate
    upper: float = 2.0
    lower: float = 0.5


@dataclass(kw_only=True)
class FilterGroupsConfig:
    """Dynamic sampling (arXiv:2503.14476, section 3.2): groups whose rewards are all equal make room for fresh prompts.

    max_num_gen_batches: batches of prompts drawn for one step, after which what is there is trained.
    """

    enable: bool = False
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
    if algorithm.kl_penalty is KlPenalty.full:
        problem = "rewards are of the tokens that were drawn, and this is a sum over all that might have been"
        remedy = "Write k1 or k3, or have it in the loss: actor.use_kl_loss=true actor.kl_loss_type=full"
        found.append(Violation("algorithm.kl_penalty", "full", problem, remedy))
    correction = algorithm.rollout_correction
    if not 0 <= correction.lower <= 1 <= correction.upper:
        problem = f"with upper={correction.upper} does not enclose a ratio of 1"
        remedy = "Write lower <= 1 <= upper"
        found.append(Violation("algorithm.rollout_correction.lower", correction.lower, problem, remedy))
    attempts = algorithm.filter_groups.max_num_gen_batches
    if attempts < 1:
        key = "algorithm.filter_groups.max_num_gen_batches"
        found.append(Violation(key, attempts, "must be positive", "Write 1 or more"))
    return found
