"""RLOO: REINFORCE with the other samples of a prompt as the baseline (arXiv:2402.14740)."""

from __future__ import annotations

from mcore_rl.config.algorithm import KlPenalty
from mcore_rl.config.algorithm_object import Algorithm, Estimator, InReward, PolicyLoss, Scope, Sourced
from mcore_rl.config.roles import LossAggregation

LEAVE_ONE_OUT = Estimator(
    name="rloo",
    function="mcore_rl.algorithms.advantages.rloo:rloo",
    scope=Scope.sequence,
    formula="`R - mean of the others`",
    paper="arXiv:2402.14740",
    min_group=2,
)

POLICY_GRADIENT = PolicyLoss(
    name="policy_gradient",
    function="mcore_rl.algorithms.losses.policy_gradient:policy_gradient",
    formula="`-A log p`",
    paper="Williams, 1992 (doi:10.1007/BF00992696)",
    needs_old=False,
    updates_per_batch=1,
)

RLOO = Algorithm(
    name="rloo",
    title="RLOO",
    about="REINFORCE; the mean of the other samples is the baseline, the KL is in the reward",
    paper="arXiv:2402.14740",
    advantages=LEAVE_ONE_OUT,
    loss=POLICY_GRADIENT,
    aggregation=Sourced(LossAggregation.seq_mean_token_sum, "arXiv:2402.14740: a response is one action"),
    samples=Sourced(4, "arXiv:2402.14740 takes 2 and 4; verl's pull request 1325 takes 4"),
    kl=InReward(KlPenalty.k1, "arXiv:2402.14740", Sourced(0.001, "verl's RLOO runs; 0.03 in the paper")),
)
