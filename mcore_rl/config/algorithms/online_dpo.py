"""Online DPO: pairs of the policy's own samples, judged by their scores (arXiv:2402.04792)."""

from __future__ import annotations

from mcore_rl.config.algorithm_object import Algorithm, Estimator, PolicyLoss, Scope, Sourced
from mcore_rl.config.pairs import PairsConfig
from mcore_rl.config.preference import PreferenceLoss
from mcore_rl.config.roles import LossAggregation

BEST_WORST = Estimator(
    name="best_worst",
    function="mcore_rl.algorithms.advantages.pairs:best_worst",
    scope=Scope.pair,
    formula="a pair: the response with the highest `R` of its group before the one with the lowest",
    paper="arXiv:2402.04792",
    min_group=2,
    refuses_kl="ranks responses by their scores, and the loss has the reference in it",
)


PREFERENCE = PolicyLoss(
    name="preference",
    function="mcore_rl.algorithms.preference:preference",
    formula="that of `actor.preference.loss` ([preferences](preferences.md#losses)), of each pair",
    paper="arXiv:2305.18290 and others",
    needs_old=False,
    aggregation=LossAggregation.seq_mean_token_sum,
    pairs=True,
    settings=PairsConfig,
)

ONLINE_DPO = Algorithm(
    name="online_dpo",
    title="Online DPO",
    about="DPO on the best and the worst sample of each prompt, as the run's own rewards judge them",
    paper="arXiv:2402.04792",
    advantages=BEST_WORST,
    loss=PREFERENCE,
    aggregation=Sourced(LossAggregation.seq_mean_token_sum, "arXiv:2305.18290, eq. 7: a mean over pairs"),
    samples=Sourced(2, "arXiv:2402.04792, algorithm 1"),
    settings={
        "actor.preference.loss": Sourced(PreferenceLoss.dpo, "arXiv:2402.04792; it has IPO and SLiC too"),
        "actor.preference.beta": Sourced(0.1, "arXiv:2305.18290, appendix B"),
    },
)
