"""OPO: on-policy RL with the optimal reward baseline (arXiv:2505.23585)."""

from __future__ import annotations

from mcore_rl.config.algorithm_object import Algorithm, Estimator, Scope, Sourced
from mcore_rl.config.algorithms.rloo import POLICY_GRADIENT
from mcore_rl.config.roles import LossAggregation

LENGTH_WEIGHTED = Estimator(
    name="opo",
    function="mcore_rl.algorithms.advantages.opo:opo",
    scope=Scope.sequence,
    formula="`R - mean weighted by length`",
    paper="arXiv:2505.23585",
    min_group=2,
)

OPO = Algorithm(
    name="opo",
    title="OPO",
    about="exactly on-policy REINFORCE with the baseline of least variance; no KL",
    paper="arXiv:2505.23585",
    advantages=LENGTH_WEIGHTED,
    loss=POLICY_GRADIENT,
    aggregation=Sourced(LossAggregation.seq_mean_token_sum, "arXiv:2505.23585: the gradient of a whole response"),
    samples=Sourced(5, "verl's runs with groups (docs/baselines.md)"),
)
