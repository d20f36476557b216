"""ReMax (arXiv:2310.10505): REINFORCE, with the score of the greedy response as the baseline."""

from __future__ import annotations

from mcore_rl.config.algorithm import KlPenalty
from mcore_rl.config.algorithm_object import Algorithm, Estimator, InReward, Scope, Sourced
from mcore_rl.config.algorithms.rloo import POLICY_GRADIENT
from mcore_rl.config.roles import LossAggregation

GREEDY_BASELINE = Estimator(
    name="remax",
    function="mcore_rl.algorithms.advantages.remax:remax",
    scope=Scope.token,
    formula="rewards from t on, minus the score of the greedy response",
    paper="arXiv:2310.10505",
    greedy=True,
)

REMAX = Algorithm(
    name="remax",
    title="ReMax",
    about="REINFORCE; the score of a greedy response is the baseline, the KL is in the reward",
    paper="arXiv:2310.10505",
    advantages=GREEDY_BASELINE,
    loss=POLICY_GRADIENT,
    aggregation=Sourced(LossAggregation.seq_mean_token_sum, "arXiv:2310.10505: the gradient of a whole response"),
    samples=Sourced(1, "arXiv:2310.10505; verl's run draws 4"),
    kl=InReward(
        KlPenalty.k1,
        "the authors' code, liziniu/ReMax",
        Sourced(0.001, "verl's run (docs/baselines.md); 0.05 in the authors' scripts"),
    ),
)
