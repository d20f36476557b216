"""PRIME: process reinforcement through implicit rewards (arXiv:2502.01456)."""

from __future__ import annotations

from mcore_rl.config.algorithm import ProcessNorm
from mcore_rl.config.algorithm_object import PROCESS_REWARD, Algorithm, Estimator, Scope, Sourced
from mcore_rl.config.algorithms.ppo import PPO_CLIP
from mcore_rl.config.roles import LossAggregation, RewardUpdate
from mcore_rl.config.stages import OUTCOMES, TOKEN_REWARDS, OnController, OnRanks

CODE = "the authors' code, PRIME-RL/PRIME, training/examples/run_prime_main.sh"
RECIPE = "verl's recipe/prime"
PROCESS_FIELDS = ("tokens_T", "mask_T", "process_logprobs_T", "process_ref_logprobs_T")

PROCESS_AND_OUTCOME = Estimator(
    name="prime",
    function="mcore_rl.algorithms.advantages.prime:prime",
    scope=Scope.token,
    formula="`A_t = r_t + gamma A_{t+1}`, `r_t` the process reward, at the end with `R`, both centred; whitened",
    paper="arXiv:2502.01456",
    roles=(PROCESS_REWARD,),
    stages=(
        OnRanks(
            function="mcore_rl.algorithms.process_rewards:process_stats",
            reads=PROCESS_FIELDS,
            makes=("process_stats",),
        ),
        OnController(
            function="mcore_rl.algorithms.process_rewards:compare",
            reads=("process_stats",),
            makes=("process_scales", "process_shifts", OUTCOMES),
        ),
        OnRanks(
            function="mcore_rl.algorithms.process_rewards:token_rewards",
            reads=(*PROCESS_FIELDS, "process_scales", "process_shifts"),
            makes=(TOKEN_REWARDS,),
        ),
    ),
    min_group=2,
    whitens=True,
    reads=frozenset({"algorithm.gamma", "algorithm.process_coef", "algorithm.outcome_coef", "algorithm.process_norm"}),
)

PRIME = Algorithm(
    name="prime",
    title="PRIME",
    about="a reward model of tokens learns from outcomes beside the policy; prompts of middling difficulty; no KL",
    paper="arXiv:2502.01456",
    advantages=PROCESS_AND_OUTCOME,
    loss=PPO_CLIP,
    aggregation=Sourced(LossAggregation.token_mean, f"{RECIPE}: verl's default"),
    samples=Sourced(4, "arXiv:2502.01456, experiments"),
    settings={
        "algorithm.gamma": Sourced(1.0, CODE),
        "algorithm.process_coef": Sourced(5.0, RECIPE),
        "algorithm.outcome_coef": Sourced(5.0, RECIPE),
        "algorithm.process_norm": Sourced(ProcessNorm.batch, f"{RECIPE}, and the authors' code"),
        "algorithm.filter_groups.enable": Sourced(True, "arXiv:2502.01456, experiments"),
        "algorithm.filter_groups.lower": Sourced(0.2, "arXiv:2502.01456, experiments"),
        "algorithm.filter_groups.upper": Sourced(0.8, "arXiv:2502.01456, experiments"),
        "algorithm.filter_groups.max_num_gen_batches": Sourced(4, f"{RECIPE}: oversample_factor=4"),
        "process_reward.beta": Sourced(0.05, "arXiv:2502.01456, experiments"),
        "process_reward.update": Sourced(RewardUpdate.before, f"{RECIPE}; the authors' script takes after"),
        "process_reward.optim.lr": Sourced(1e-6, "arXiv:2502.01456, experiments"),
        "process_reward.optim.clip_grad": Sourced(10.0, CODE),
    },
)
