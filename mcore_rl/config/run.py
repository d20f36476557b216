"""One run of ``mcore-rl train``, whole: all groups, and what of one contradicts another.

``run_violations`` needs no file and starts nothing; ``controller/lifecycle/model_checks.py`` checks what depends on the
checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mcore_rl.config.algorithm import AdvEstimator, AlgorithmConfig, algorithm_violations
from mcore_rl.config.data import DataConfig, data_violations
from mcore_rl.config.recipe import RecipeConfig
from mcore_rl.config.reward import CustomRewardFunction, RewardConfig, reward_violations
from mcore_rl.config.reward_model import RewardModelConfig, reward_model_violations
from mcore_rl.config.roles import (
    ActorConfig,
    CriticConfig,
    LossAggregation,
    LossMode,
    actor_violations,
    critic_violations,
)
from mcore_rl.config.rollout import RolloutConfig, rollout_config_violations
from mcore_rl.config.trainer import ModelPathConfig, Placement, RayInitConfig, TrainerConfig, trainer_violations
from mcore_rl.errors import Violation

GROUPED = {
    AdvEstimator.grpo,
    AdvEstimator.dr_grpo,
    AdvEstimator.rloo,
    AdvEstimator.reinforce_plus_plus_baseline,
    AdvEstimator.gpg,
    AdvEstimator.opo,
    AdvEstimator.lite_ppo,
    AdvEstimator.gdpo,
}


@dataclass(kw_only=True)
class RunConfig:
    """What ``mcore-rl train`` runs."""

    recipe: RecipeConfig = field(default_factory=RecipeConfig)
    model: ModelPathConfig = field(default_factory=ModelPathConfig)
    data: DataConfig = field(default_factory=DataConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    custom_reward_function: CustomRewardFunction = field(default_factory=CustomRewardFunction)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    ray_init: RayInitConfig = field(default_factory=RayInitConfig)

    @property
    def needs_critic(self) -> bool:
        """Whether values are estimated."""
        return self.algorithm.adv_estimator is AdvEstimator.gae

    @property
    def needs_reference(self) -> bool:
        """Whether anything asks how far the policy is from where it started."""
        return self.algorithm.use_kl_in_reward or self.actor.use_kl_loss

    @property
    def needs_greedy(self) -> bool:
        """Whether each prompt is also answered greedily, for a baseline."""
        return self.algorithm.adv_estimator is AdvEstimator.remax


def run_violations(run: RunConfig) -> list[Violation]:
    """Everything wrong in ``run`` that can be told without opening a file."""
    found = [
        *data_violations(run.data),
        *algorithm_violations(run.algorithm),
        *actor_violations(run.actor),
        *(critic_violations(run.critic) if run.needs_critic else ()),
        *rollout_config_violations(run.rollout),
        *reward_violations(run.reward),
        *reward_model_violations(run.reward_model),
        *trainer_violations(run.trainer),
    ]
    if run.data.train_batch_size < 1 or run.rollout.n < 1 or run.trainer.world_size < 1:
        return found  # the rules below divide by these
    return [*found, *_batch_violations(run), *_algorithm_violations(run), *_share_violations(run), *_missing(run)]


def _batch_violations(run: RunConfig) -> list[Violation]:
    found, size = [], run.data.train_batch_size
    for role, mini in (("actor", run.actor.ppo_mini_batch_size), ("critic", run.critic.ppo_mini_batch_size)):
        if mini < 1 or (role == "critic" and not run.needs_critic):
            continue
        if size % mini:
            fitting = max(part for part in range(1, min(mini, size) + 1) if size % part == 0)
            problem = f"does not divide data.train_batch_size={size}"
            found.append(Violation(f"{role}.ppo_mini_batch_size", mini, problem, f"Write {fitting}, say"))
    drawn, filtering = run.data.gen_batch_size, run.algorithm.filter_groups.enable
    if drawn is not None and not filtering and drawn != size:
        problem = f"differs from data.train_batch_size={size}, and no groups are filtered"
        remedy = "Leave it out, or write algorithm.filter_groups.enable=true"
        found.append(Violation("data.gen_batch_size", drawn, problem, remedy))
    attempts = run.algorithm.filter_groups.max_num_gen_batches
    if drawn is not None and filtering and 0 < drawn * attempts < size:
        problem = f"times algorithm.filter_groups.max_num_gen_batches={attempts} is less than "
        problem += f"data.train_batch_size={size}: a step could not be filled"
        remedy = f"Write {-(-size // attempts)} or more"
        found.append(Violation("data.gen_batch_size", drawn, problem, remedy))
    overlong, longest = run.reward.overlong, run.data.max_response_length
    if overlong.enable and overlong.length >= longest:
        problem = f"punishes every response, since data.max_response_length={longest}"
        remedy = f"Write {max(1, longest // 4)}, say"
        found.append(Violation("reward.overlong.length", overlong.length, problem, remedy))
    for name in ("max_prompt_length", "max_response_length"):
        here, there = getattr(run.data, name), getattr(run.rollout, name)
        if here != there:
            problem = f"differs from data.{name}={here}"
            found.append(Violation(f"rollout.{name}", there, problem, f"Leave it out: it is data.{name}"))
    return found


def _algorithm_violations(run: RunConfig) -> list[Violation]:
    found, algorithm, n = [], run.algorithm, run.rollout.n
    name = algorithm.adv_estimator.value
    if algorithm.adv_estimator in GROUPED and n < 2:
        problem = f"algorithm.adv_estimator={name} compares the samples of a prompt, and there is one"
        found.append(Violation("rollout.n", n, problem, "Write rollout.n=5, say, or another estimator"))
    if algorithm.filter_groups.enable and n < 2:
        problem = "algorithm.filter_groups.enable looks for groups whose rewards differ, and a group has one sample"
        found.append(Violation("rollout.n", n, problem, "Write rollout.n=8, say, or enable=false"))
    of_sequences = {
        LossMode.gspo: "GSPO's objective is a mean over sequences (arXiv:2507.18071, eq. 5)",
        LossMode.geo_mean: "GMPO's objective is a mean over sequences (arXiv:2507.20673)",
    }
    loss = run.actor.loss_mode
    if loss in of_sequences and run.actor.loss_agg_mode is not LossAggregation.seq_mean_token_mean:
        problem = of_sequences[loss]
        remedy = "Write actor.loss_agg_mode=seq_mean_token_mean"
        found.append(Violation("actor.loss_agg_mode", run.actor.loss_agg_mode.value, problem, remedy))
    drawn = run.rollout
    if drawn.temperature == 0:
        problem = "greedy samples are of no distribution that could be trained"
        found.append(Violation("rollout.temperature", 0, problem, "Write rollout.temperature=1.0"))
    key, reads = "algorithm.rollout_correction", algorithm.rollout_correction.reads_ratio
    if reads is not None and (drawn.top_p < 1 or drawn.top_k != -1):
        problem = "with top_p or top_k, sampler and trainer mean different distributions, and the ratio says nothing"
        remedy = "Write rollout.top_p=1.0 rollout.top_k=-1, or leave it out"
        found.append(Violation(f"{key}.{reads[0]}", reads[1], problem, remedy))
    if algorithm.rollout_correction.bypass_mode and loss in (LossMode.gpg, LossMode.policy_gradient):
        problem = f"actor.loss_mode={loss.value} has no ratio, and the sampler's log-probs would be read by nobody"
        found.append(Violation(f"{key}.bypass_mode", True, problem, "Write false and level=token, or another loss"))
    if run.trainer.critic_warmup and not run.needs_critic:
        problem = f"there is no critic: algorithm.adv_estimator={name} needs no values"
        remedy = "Write trainer.critic_warmup=0 or algorithm.adv_estimator=gae"
        found.append(Violation("trainer.critic_warmup", run.trainer.critic_warmup, problem, remedy))
    return found


def _share_violations(run: RunConfig) -> list[Violation]:
    """Engines of both kinds are awake together, on the same devices unless the rollout has its own."""
    if not run.reward_model.enable or run.trainer.placement is Placement.separate:
        return []
    rollout, judge = run.rollout.gpu_memory_utilization, run.reward_model.gpu_memory_utilization
    if rollout + judge <= 1:
        return []
    problem = f"and rollout.gpu_memory_utilization={rollout:g} are more than a device, which both are awake on"
    remedy = "Lower one of them, or write trainer.placement=separate"
    return [Violation("reward_model.gpu_memory_utilization", judge, problem, remedy)]


def _missing(run: RunConfig) -> list[Violation]:
    found = []
    if not run.model.path:
        remedy = "Write model.path=DIR, a Hugging Face checkpoint"
        found.append(Violation("model.path", "", "is not set", remedy))
    if not run.data.train_files and not run.trainer.val_only:
        found.append(
            Violation("data.train_files", "[]", "there is nothing to train on", "Write data.train_files=[FILE]")
        )
    validates = run.trainer.val_only or run.trainer.test_freq
    if not run.data.val_files and validates:
        asked = "trainer.val_only" if run.trainer.val_only else f"trainer.test_freq={run.trainer.test_freq}"
        found.append(Violation("data.val_files", "[]", f"{asked} needs some", "Write data.val_files=[FILE]"))
    return found
