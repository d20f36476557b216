"""Best of n: of the samples of a prompt the best is trained (arXiv:2304.06767)."""

from __future__ import annotations

from mcore_rl.config.algorithm_object import Algorithm, Estimator, Scope, Sourced
from mcore_rl.config.algorithms.rloo import POLICY_GRADIENT
from mcore_rl.config.roles import LossAggregation

BEST_ONLY = Estimator(
    name="best_of_n",
    function="mcore_rl.algorithms.advantages.raft:best_of_n",
    scope=Scope.sequence,
    formula="`1 / ties` where R is the highest of its group, else 0; 0 where all are equal",
    paper="arXiv:2304.06767",
    min_group=2,
    refuses_kl="treats equal scores alike, and a KL makes none equal",
)

BEST_OF_N = Algorithm(
    name="best_of_n",
    title="Best of n",
    about="supervised fine-tuning on the best response to each prompt; no KL",
    paper="arXiv:2304.06767",
    advantages=BEST_ONLY,
    loss=POLICY_GRADIENT,
    aggregation=Sourced(LossAggregation.seq_mean_token_sum, "arXiv:2304.06767: the likelihood of a response"),
    samples=Sourced(8, "ours: enough for one right response at an accuracy of a third, 96 of 100 times"),
)
