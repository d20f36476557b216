"""GPG: group policy gradient (arXiv:2504.02546)."""

from __future__ import annotations

from mcore_rl.config.algorithm_object import Algorithm, Estimator, PolicyLoss, Scope, Sourced
from mcore_rl.config.roles import LossAggregation

GROUP_CENTRED_SCALED = Estimator(
    name="gpg",
    function="mcore_rl.algorithms.advantages.gpg:gpg",
    scope=Scope.sequence,
    formula="`alpha (R - mean)`, `alpha` = responses / responses in groups whose scores differ",
    paper="arXiv:2504.02546",
    min_group=2,
)

GPG_LOSS = PolicyLoss(
    name="gpg",
    function="mcore_rl.algorithms.losses.gpg:gpg",
    formula="`-A log p`",
    paper="arXiv:2504.02546",
    needs_old=False,
    updates_per_batch=1,
)

GPG = Algorithm(
    name="gpg",
    title="GPG",
    about="the plain policy gradient of group advantages; no KL, no clipping",
    paper="arXiv:2504.02546",
    advantages=GROUP_CENTRED_SCALED,
    loss=GPG_LOSS,
    aggregation=Sourced(LossAggregation.token_mean, "arXiv:2504.02546: over all tokens of the group"),
    samples=Sourced(5, "verl's GPG run (docs/baselines.md)"),
)
