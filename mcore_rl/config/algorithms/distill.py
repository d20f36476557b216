"""On-policy distillation: a frozen teacher scores the tokens that the policy draws.

The policy minimizes ``KL(policy || teacher)`` of its own samples: MiniLLM (arXiv:2306.08543), and GKD with the reverse
KL (arXiv:2306.13649).  Of a token that the policy drew, ``log p_policy - log p_teacher`` is an unbiased estimate of
that KL given the tokens before it, and its negative is the token's advantage: the policy gradient of these advantages
is, in expectation, that of the KL at each token (Thinking Machines, "On-policy distillation", 2025).  What a token does
to the KL of later ones is left out, as there and in arXiv:2306.13649, which stops the gradient at the samples.
"""

from __future__ import annotations

from mcore_rl.config.algorithm_object import NO_REWARD, Algorithm, Estimator, Scope, Sourced
from mcore_rl.config.algorithms.rloo import POLICY_GRADIENT
from mcore_rl.config.roles import LossAggregation

COOKBOOK = "tinker-cookbook, recipes/distillation/on_policy_distillation.py"

NOTHING = Estimator(
    name=NO_REWARD,
    function="mcore_rl.algorithms.advantages.none:none",
    scope=Scope.sequence,
    formula="0: nothing is learnt from the reward",
    paper="Thinking Machines, On-policy distillation (2025)",
    refuses_kl="reads no reward, so that a KL in it would do nothing",
)

DISTILL = Algorithm(
    name="distill",
    title="On-policy distillation",
    about="a frozen teacher scores each token that the policy draws; the reward is measured and not learnt from; no KL",
    paper="arXiv:2306.08543, 2306.13649; Thinking Machines, On-policy distillation (2025)",
    advantages=NOTHING,
    loss=POLICY_GRADIENT,
    aggregation=Sourced(LossAggregation.token_mean, f"{COOKBOOK}: a sum over tokens, here over their number"),
    samples=Sourced(4, f"{COOKBOOK}: group_size"),
    teacher=Sourced(1.0, f"{COOKBOOK}: kl_penalty_coef"),
)
