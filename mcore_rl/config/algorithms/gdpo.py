"""GDPO: group reward-decoupled normalization policy optimization (arXiv:2601.05242)."""

from __future__ import annotations

from mcore_rl.config.algorithm_object import Algorithm, Estimator, Scope, Sourced
from mcore_rl.config.algorithms.ppo import PPO_CLIP
from mcore_rl.config.roles import LossAggregation

REWARD_DECOUPLED = Estimator(
    name="gdpo",
    function="mcore_rl.algorithms.advantages.gdpo:gdpo",
    scope=Scope.sequence,
    formula="`Z / (std of Z over the step + 1e-6)`, `Z = sum of w_k (R_k - mean_k) / (std_k + 1e-6)` over rewards k",
    paper="arXiv:2601.05242",
    min_group=2,
    parts=True,
    refuses_kl="reads the parts of the reward, and the KL is none",
    reads=frozenset({"algorithm.gdpo_reward_keys", "algorithm.gdpo_reward_weights"}),
)

GDPO = Algorithm(
    name="gdpo",
    title="GDPO",
    about="each named reward is normalized within the group by itself; no KL",
    paper="arXiv:2601.05242",
    advantages=REWARD_DECOUPLED,
    loss=PPO_CLIP,
    aggregation=Sourced(LossAggregation.token_mean, "NVlabs/GDPO, verl-GDPO/train_gdpo.sh: verl's default"),
    samples=Sourced(4, "NVlabs/GDPO, verl-GDPO/train_gdpo.sh"),
    settings={
        "algorithm.gdpo_reward_keys": Sourced(["acc", "format"], "arXiv:2601.05242: correctness and format"),
    },
)
