"""SPPO: self-play preference optimization (arXiv:2405.00675)."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.config.algorithm import AlgorithmConfig
from mcore_rl.config.algorithm_object import Algorithm, Estimator, PolicyLoss, Scope, Sourced
from mcore_rl.config.bounds import PositiveFloat
from mcore_rl.config.roles import LossAggregation


@dataclass(kw_only=True)
class SppoConfig(AlgorithmConfig):
    """sppo_eta: nats of log-ratio that a whole win, or with ``softmean`` a score of 1, is worth."""

    sppo_eta: PositiveFloat = 1.0


WIN_RATE = Estimator(
    name="win_rate",
    function="mcore_rl.algorithms.advantages.sppo:win_rate",
    scope=Scope.sequence,
    formula="`eta (P - 1/2)`, `P` the share of the group's other responses that score less, equals counted half",
    paper="arXiv:2405.00675",
    min_group=2,
    refuses_kl="counts wins, and a KL makes a winner of one of two equal scores",
    settings=SppoConfig,
)

LOG_RATIO_REGRESSION = PolicyLoss(
    name="sppo",
    function="mcore_rl.algorithms.losses.sppo:sppo",
    formula="`(sum of log r - A)^2` of a response",
    paper="arXiv:2405.00675",
    aggregation=LossAggregation.seq_mean_token_sum,
)

SPPO = Algorithm(
    name="sppo",
    title="SPPO",
    about="a response's log-ratio is drawn to its share of wins within the group; no KL",
    paper="arXiv:2405.00675",
    advantages=WIN_RATE,
    loss=LOG_RATIO_REGRESSION,
    aggregation=Sourced(LossAggregation.seq_mean_token_sum, "arXiv:2405.00675, eq. 3.3: a mean over responses"),
    samples=Sourced(5, "arXiv:2405.00675, section 5.1"),
    settings={
        "algorithm.sppo_eta": Sourced(
            1.0, "verl's recipe/sppo; the paper takes 1000 for its thousands of steps without new samples"
        )
    },
)
