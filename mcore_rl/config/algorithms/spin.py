"""SPIN: self-play fine-tuning, the data's answers before the policy's own (arXiv:2401.01335)."""

from __future__ import annotations

from mcore_rl.config.algorithm_object import Algorithm, Estimator, Scope, Sourced
from mcore_rl.config.algorithms.online_dpo import PREFERENCE
from mcore_rl.config.preference import PreferenceLoss
from mcore_rl.config.roles import LossAggregation

TRUE_ANSWER = Estimator(
    name="true_answer",
    function="mcore_rl.algorithms.advantages.pairs:true_answer",
    scope=Scope.pair,
    formula="a pair for each response: the row's own answer before it, whatever `R`",
    paper="arXiv:2401.01335",
    refuses_kl="reads no scores, and the loss has the reference in it",
    answers=True,
)

SPIN = Algorithm(
    name="spin",
    title="SPIN",
    about="the data's own answers are preferred to the policy's samples; the reference follows the policy",
    paper="arXiv:2401.01335",
    advantages=TRUE_ANSWER,
    loss=PREFERENCE,
    aggregation=Sourced(LossAggregation.seq_mean_token_sum, "arXiv:2401.01335, eq. 4.7: a mean over rows"),
    samples=Sourced(1, "arXiv:2401.01335, algorithm 1"),
    settings={
        "data.answer_key": Sourced(
            "extra_info.answer", "where mcore-rl prepare writes it, as verl's preprocessing does"
        ),
        "algorithm.ref_update_freq": Sourced(1, "verl's recipe/spin; the paper's opponent, of a step per iteration"),
        "actor.preference.loss": Sourced(PreferenceLoss.dpo, "arXiv:2401.01335, section 4.1: the logistic loss"),
        "actor.preference.beta": Sourced(0.1, "arXiv:2401.01335, appendix B: lambda"),
    },
)
