"""RAFT: rejection sampling, the responses with a positive score are trained (arXiv:2504.11343, arXiv:2304.06767)."""

from __future__ import annotations

from mcore_rl.config.algorithm import KlPenalty
from mcore_rl.config.algorithm_object import Algorithm, Estimator, InLoss, Scope, Sourced
from mcore_rl.config.algorithms.rloo import POLICY_GRADIENT
from mcore_rl.config.roles import LossAggregation

POSITIVE_ONLY = Estimator(
    name="raft",
    function="mcore_rl.algorithms.advantages.raft:raft",
    scope=Scope.sequence,
    formula="`max(R, 0)`",
    paper="arXiv:2504.11343",
    refuses_kl="trains what has a positive score, and a KL can make a wrong response positive",
)

# RLHFlow/Minimal-RL, scripts/run_raft.sh and run_raftpp.sh: the code of arXiv:2504.11343.
TOKEN_MEAN = Sourced(LossAggregation.token_mean, "RLHFlow/Minimal-RL, scripts/run_raft.sh: verl's default then")
FOUR = Sourced(4, "RLHFlow/Minimal-RL, scripts/run_raft.sh")
KL = InLoss(
    KlPenalty.low_var_kl,
    "RLHFlow/Minimal-RL, scripts/run_raft.sh",
    Sourced(0.001, "RLHFlow/Minimal-RL, scripts/run_raft.sh"),
)

ENTROPY = {"actor.entropy_coeff": Sourced(0.001, "RLHFlow/Minimal-RL, verl/trainer/config/ppo_trainer.yaml")}

RAFT = Algorithm(
    name="raft",
    title="RAFT",
    about="rejection sampling: the responses with a positive score are trained, and nothing is learnt from the others",
    paper="arXiv:2504.11343",
    advantages=POSITIVE_ONLY,
    loss=POLICY_GRADIENT,
    aggregation=TOKEN_MEAN,
    samples=FOUR,
    kl=KL,
    settings=ENTROPY,
)
