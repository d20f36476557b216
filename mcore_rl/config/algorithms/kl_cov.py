"""KL-Cov (arXiv:2505.22617)."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.config.algorithm_object import Algorithm, PolicyLoss, Sourced, TokenSelection
from mcore_rl.config.algorithms.grpo import GROUP_NORMALIZED
from mcore_rl.config.bounds import NonNegativeFloat, PositiveShare
from mcore_rl.config.roles import ActorConfig, LossAggregation

RECIPE = "PRIME-RL/Entropy-Mechanism-of-RL, recipe/dapo/7b_kl_cov.sh"


@dataclass(kw_only=True)
class KlCovConfig(ActorConfig):
    """kl_cov_ratio, ppo_kl_coef: the share of tokens that pay for moving, and the coefficient of what they pay."""

    kl_cov_ratio: PositiveShare = 0.0002
    ppo_kl_coef: NonNegativeFloat = 1.0


COVARIANCE_KL = PolicyLoss(
    name="kl_cov",
    function="mcore_rl.algorithms.losses.kl_cov:kl_cov",
    formula="`-A r`, and `+ ppo_kl_coef abs(log r)` at selected tokens",
    paper="arXiv:2505.22617",
    selection=TokenSelection(keys="mcore_rl.algorithms.losses.kl_cov:kl_cov_keys", share="kl_cov_ratio"),
    settings=KlCovConfig,
)

KL_COV = Algorithm(
    name="kl_cov",
    title="KL-Cov",
    about="the tokens of the highest covariance pay for moving, which keeps the entropy; no clipping",
    paper="arXiv:2505.22617",
    advantages=GROUP_NORMALIZED,
    loss=COVARIANCE_KL,
    aggregation=Sourced(LossAggregation.token_mean, RECIPE),
    samples=Sourced(8, RECIPE),
    settings={
        "actor.kl_cov_ratio": Sourced(0.002, f"{RECIPE}: 0.2 %; 0.02 % at 32B"),
        "actor.ppo_kl_coef": Sourced(1.0, RECIPE),
        "algorithm.filter_groups.enable": Sourced(True, RECIPE),
        "algorithm.filter_groups.max_num_gen_batches": Sourced(10, RECIPE),
    },
)
