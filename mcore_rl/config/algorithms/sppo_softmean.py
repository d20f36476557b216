"""SPPO as verl's recipe runs it, which needs no groups (recipe/sppo, after arXiv:2405.00675)."""

from __future__ import annotations

from mcore_rl.config.algorithm_object import Algorithm, Estimator, Scope, Sourced
from mcore_rl.config.algorithms.sppo import LOG_RATIO_REGRESSION, SppoConfig
from mcore_rl.config.roles import LossAggregation

SOFTMEAN = Estimator(
    name="softmean",
    function="mcore_rl.algorithms.advantages.sppo:softmean",
    scope=Scope.sequence,
    formula="`eta R - log mean exp(eta R)` over the step",
    paper="verl's recipe/sppo",
    over_step=True,
    settings=SppoConfig,
)

SPPO_SOFTMEAN = Algorithm(
    name="sppo_softmean",
    title="SPPO without groups",
    about="SPPO as verl's recipe runs it: scores less their soft mean over the step, one response a prompt; no KL",
    paper="arXiv:2405.00675, as verl's recipe/sppo runs it",
    advantages=SOFTMEAN,
    loss=LOG_RATIO_REGRESSION,
    aggregation=Sourced(LossAggregation.seq_mean_token_sum, "arXiv:2405.00675, eq. 3.3: a mean over responses"),
    samples=Sourced(1, "verl's recipe/sppo/run_qwen2.5-7b_rm.sh"),
    settings={"algorithm.sppo_eta": Sourced(1.0, "verl's recipe/sppo")},
)
