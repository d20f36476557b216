"""PRIME: process reinforcement through implicit rewards (arXiv:2502.01456)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

from mcore_rl.config.algorithm_object import Algorithm, Estimator, Scope, Sourced
from mcore_rl.config.algorithms.ppo import PPO_CLIP, DiscountedConfig
from mcore_rl.config.bounds import CrossCheck, NonNegativeFloat, PositiveFloat
from mcore_rl.config.role import Role
from mcore_rl.config.roles import LossAggregation, TrainedModelConfig
from mcore_rl.config.stages import OUTCOME, OUTCOMES, TOKEN_REWARDS, OnController, OnRanks, StepStage
from mcore_rl.ground.errors import Violation

if TYPE_CHECKING:
    from mcore_rl.config.run import RunConfig

CODE = "the authors' code, PRIME-RL/PRIME, training/examples/run_prime_main.sh"
RECIPE = "verl's recipe/prime"
PROCESS_FIELDS = ("tokens_T", "mask_T", "process_logprobs_T", "process_ref_logprobs_T")


class RewardUpdate(Enum):
    """Whether the process reward model is trained on the responses of a step before or after it rewards them.

    The names are those of PRIME's code (arXiv:2502.01456).
    """

    before = "before"
    after = "after"


class ProcessNorm(Enum):
    """How process rewards are scaled.

    ``none``: not at all.  ``batch``: so that the largest sum of a token's and all later process rewards is 1 in the
    step, up to its sign (PRIME's code, ``batch_norm``).
    """

    none = "none"
    batch = "batch"


@dataclass(kw_only=True)
class PrimeConfig(DiscountedConfig):
    """How tokens are rewarded.

    process_coef, outcome_coef: factors of the process rewards and of the outcome.
    process_norm: see ``ProcessNorm``.
    """

    process_coef: NonNegativeFloat = 1.0
    outcome_coef: NonNegativeFloat = 1.0
    process_norm: ProcessNorm = ProcessNorm.batch


@dataclass(kw_only=True)
class ProcessRewardConfig(TrainedModelConfig):
    """The implicit process reward model of PRIME (arXiv:2502.01456), trained beside the policy in a layout of its own.

    Its reference is a frozen copy of its first weights.

    beta: the reward of a token is ``beta`` times its log-ratio to the reference.
    update: see ``RewardUpdate``.
    """

    beta: PositiveFloat = 0.05
    update: RewardUpdate = RewardUpdate.before
    loss_agg_mode: LossAggregation = LossAggregation.seq_mean_token_sum

    def rules(self, key: str) -> list[CrossCheck[Any]]:
        """As ``RoleConfig.rules``."""
        return [*super().rules(key), partial(_outcome_violations, key=key)]


def _outcome_violations(config: ProcessRewardConfig, key: str) -> list[Violation]:
    if config.loss_agg_mode is LossAggregation.seq_mean_token_sum:
        return []
    problem = "the loss is of whole responses, and its mean is over these"
    remedy = "Leave it out: it is seq_mean_token_sum"
    return [Violation(f"{key}.loss_agg_mode", config.loss_agg_mode.value, problem, remedy)]


def _stages(role: Role, run: RunConfig) -> Sequence[StepStage]:
    """PRIME's reward model is trained on outcomes, before or after it rewards the responses of a step."""
    rewards = role.scores("process_logprobs_T", sampled=False)
    learns = role.update("process_ref_logprobs_T", OUTCOME, whole=True, sampled=False)
    copy = role.copy_scores("process_ref_logprobs_T", sampled=False)
    config = run.role_config(role)
    assert isinstance(config, ProcessRewardConfig)
    return [copy, learns, rewards] if config.update is RewardUpdate.before else [copy, rewards, learns]


PROCESS_REWARD = Role(
    name="process_reward",
    trains=True,
    weights="process_reward.path",
    config=ProcessRewardConfig,
    stages=_stages,
    keeps_copy=True,
    loss="mcore_rl.algorithms.outcome_loss:outcome_loss",
    phase="process_rewards",
)

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
    settings=PrimeConfig,
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
