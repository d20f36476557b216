"""What is refused of ``mcore-rl train`` before a file is opened: by the key that the user wrote, and all at once."""

from __future__ import annotations

from pathlib import Path

import pytest

import mcore_rl.conf
from mcore_rl.config.algorithm import AdvEstimator
from mcore_rl.config.compose import compose
from mcore_rl.config.run import RunConfig, run_violations

SOUND = ["model.path=m", "data.train_files=[t.parquet]", "data.val_files=[v.parquet]"]
ALGORITHMS = sorted(path.stem for path in Path(mcore_rl.conf.__file__).parent.glob("algorithm/*.yaml"))


def run_of(*overrides: str) -> RunConfig:
    return compose(RunConfig, "train", [*SOUND, *overrides])


def refusals(*overrides: str) -> list[str]:
    return [str(violation) for violation in run_violations(run_of(*overrides))]


def test_every_algorithm_has_a_file() -> None:
    found = {run_of(f"algorithm={name}").algorithm.adv_estimator for name in ALGORITHMS}
    assert found == set(AdvEstimator) - {AdvEstimator.gae} | {run_of("algorithm=ppo").algorithm.adv_estimator}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_runs_with_a_model_and_data_alone(name: str) -> None:
    assert refusals(f"algorithm={name}") == []


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_runs_with_short_responses_and_a_small_batch(name: str) -> None:
    small = ["data.train_batch_size=8", "data.max_response_length=600", "actor.ppo_mini_batch_size=8"]
    assert refusals(f"algorithm={name}", *small) == []


def test_the_roles_that_an_algorithm_needs() -> None:
    needs = {name: run_of(f"algorithm={name}") for name in ALGORITHMS}
    assert {name for name, run in needs.items() if run.needs_critic} == {"ppo"}
    assert {name for name, run in needs.items() if run.needs_greedy} == {"remax"}
    referring = {"grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "rloo"}
    assert {name for name, run in needs.items() if run.needs_reference} == referring


def test_what_one_key_says_holds_for_all_that_follow_it() -> None:
    run = run_of("data.max_response_length=77", "trainer.device=cpu", "actor.precision=float32", "algorithm=opo")
    assert run.rollout.max_response_length == 77
    assert {each.device for each in (run.rollout, run.actor, run.critic, run.reward_model)} == {run.trainer.device}
    assert run.rollout.dtype is run.critic.precision is run.actor.precision is run.reward_model.dtype
    assert run.actor.ppo_mini_batch_size == run.critic.ppo_mini_batch_size == run.data.train_batch_size


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        # what is missing
        ("model.path=''", "model.path=: is not set. Write model.path=DIR"),
        ("data.train_files=[]", "data.train_files=[]: there is nothing to train on"),
        ("data.val_files=[] trainer.test_freq=3", "data.val_files=[]: trainer.test_freq=3 needs some"),
        ("data.val_files=[] trainer.val_only=true", "data.val_files=[]: trainer.val_only needs some"),
        # batches
        ("data.train_batch_size=0", "data.train_batch_size=0: must be positive"),
        ("data.val_batch_size=0", "data.val_batch_size=0: must be positive"),
        ("data.train_max_samples=-1", "data.train_max_samples=-1: must be positive"),
        (
            "data.train_batch_size=10 actor.ppo_mini_batch_size=4",
            "actor.ppo_mini_batch_size=4: does not divide data.train_batch_size=10. Write 2, say",
        ),
        (
            "data.train_batch_size=10 actor.ppo_mini_batch_size=64",
            "actor.ppo_mini_batch_size=64: does not divide data.train_batch_size=10. Write 10, say",
        ),
        (
            "algorithm=ppo data.train_batch_size=10 actor.ppo_mini_batch_size=5 critic.ppo_mini_batch_size=3",
            "critic.ppo_mini_batch_size=3: does not divide data.train_batch_size=10. Write 2, say",
        ),
        ("actor.ppo_mini_batch_size=0", "actor.ppo_mini_batch_size=0: must be positive"),
        ("actor.ppo_epochs=0", "actor.ppo_epochs=0: must be positive"),
        ("data.gen_batch_size=7", "data.gen_batch_size=7: differs from data.train_batch_size=1024, and no groups"),
        (
            "algorithm=dapo data.gen_batch_size=8 algorithm.filter_groups.max_num_gen_batches=2",
            "data.gen_batch_size=8: times algorithm.filter_groups.max_num_gen_batches=2 is less than "
            "data.train_batch_size=1024",
        ),
        ("rollout.max_response_length=9", "rollout.max_response_length=9: differs from data.max_response_length=512"),
        # the reward model
        ("reward_model.enable=true", "reward_model.model.path=: is not set. Write reward_model.model.path=DIR"),
        (
            "reward_model.enable=true reward_model.model.path=m reward_model.max_length=0",
            "reward_model.max_length=0: must be positive",
        ),
        (
            "reward_model.enable=true reward_model.model.path=m reward_model.gpu_memory_utilization=0.6",
            "reward_model.gpu_memory_utilization=0.6: and rollout.gpu_memory_utilization=0.5 are more than a device",
        ),
        # algorithms
        ("rollout.n=1", "rollout.n=1: algorithm.adv_estimator=grpo compares the samples of a prompt"),
        ("algorithm=ppo algorithm.filter_groups.enable=true", "rollout.n=1: algorithm.filter_groups.enable looks"),
        ("algorithm=gspo actor.loss_agg_mode=token_mean", "actor.loss_agg_mode=token_mean: GSPO's objective"),
        ("algorithm=ppo rollout.temperature=0", "rollout.temperature=0: greedy samples are of no distribution"),
        (
            "algorithm.rollout_correction.level=token rollout.top_p=0.9",
            "algorithm.rollout_correction.level=token: with top_p or top_k",
        ),
        (
            "algorithm.rollout_correction.reject=seq_mean_k1 algorithm.rollout_correction.reject_upper=1.1 "
            "rollout.top_k=9",
            "algorithm.rollout_correction.reject=seq_mean_k1: with top_p or top_k",
        ),
        (
            "algorithm.rollout_correction.bypass_mode=true rollout.top_p=0.9",
            "algorithm.rollout_correction.bypass_mode=True: with top_p or top_k",
        ),
        (
            "algorithm=gpg algorithm.rollout_correction.bypass_mode=true",
            "algorithm.rollout_correction.bypass_mode=True: actor.loss_mode=gpg has no ratio",
        ),
        (
            "algorithm.rollout_correction.level=token algorithm.rollout_correction.bypass_mode=true",
            "algorithm.rollout_correction.bypass_mode=True: with level=token corrects twice",
        ),
        (
            "algorithm.rollout_correction.batch_normalize=true",
            "algorithm.rollout_correction.batch_normalize=True: there are no weights: level=none",
        ),
        (
            "algorithm.rollout_correction.reject=seq_mean_k1",
            "algorithm.rollout_correction.reject_upper=None: must be 1 or more, a ratio, with reject=seq_mean_k1",
        ),
        (
            "algorithm.rollout_correction.reject=seq_max_k3 algorithm.rollout_correction.reject_upper=0",
            "algorithm.rollout_correction.reject_upper=0.0: must be positive, nats, with reject=seq_max_k3",
        ),
        (
            "algorithm.rollout_correction.reject=seq_max_k3 algorithm.rollout_correction.reject_upper=1 "
            "algorithm.rollout_correction.reject_lower=0.1",
            "algorithm.rollout_correction.reject_lower=0.1: reject=seq_max_k3 is never negative",
        ),
        (
            "algorithm.rollout_correction.reject=token_k1 algorithm.rollout_correction.reject_upper=2 "
            "algorithm.rollout_correction.reject_lower=1.5",
            "algorithm.rollout_correction.reject_lower=1.5: must lie in (0, 1]",
        ),
        (
            "algorithm.rollout_correction.reject_upper=2",
            "algorithm.rollout_correction.reject_upper=2.0: nothing is rejected",
        ),
        ("algorithm.kl_penalty=k3_plus", "algorithm.kl_penalty=k3_plus: differs in its gradient alone"),
        ("algorithm=gdpo algorithm.gdpo_reward_keys=[]", "algorithm.gdpo_reward_keys=[]: gdpo normalises each part"),
        (
            "algorithm=gdpo algorithm.gdpo_reward_weights=[1,2,3]",
            "algorithm.gdpo_reward_weights=[1.0, 2.0, 3.0]: has 3 weights for 2 gdpo_reward_keys",
        ),
        ("algorithm=gdpo algorithm.use_kl_in_reward=true", "algorithm.use_kl_in_reward=True: gdpo reads the parts"),
        ("algorithm.rollout_correction.lower=1.5", "algorithm.rollout_correction.lower=1.5: with upper=2.0 does not"),
        ("trainer.critic_warmup=3", "trainer.critic_warmup=3: there is no critic"),
        ("algorithm.gamma=1.1", "algorithm.gamma=1.1: must lie in [0, 1]"),
        ("algorithm.lam=-0.1", "algorithm.lam=-0.1: must lie in [0, 1]"),
        ("algorithm.kl_penalty=full", "algorithm.kl_penalty=full: rewards are of the tokens that were drawn"),
        ("algorithm.kl_ctrl.kl_coef=-1", "algorithm.kl_ctrl.kl_coef=-1.0: must not be negative"),
        (
            "algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.target_kl=0",
            "algorithm.kl_ctrl.type=adaptive: an adaptive controller divides by target_kl=0.0",
        ),
        (
            "algorithm.filter_groups.max_num_gen_batches=0",
            "algorithm.filter_groups.max_num_gen_batches=0: must be positive",
        ),
        # roles
        ("actor.clip_ratio=-0.1", "actor.clip_ratio=-0.1: must not be negative"),
        ("actor.clip_ratio_c=1.2", "actor.clip_ratio_c=1.2: must exceed 1 + the upper clip range, 1.2"),
        ("actor.loss_mode=geo_mean", "actor.loss_agg_mode=token_mean: GMPO's objective is a mean over sequences"),
        ("actor.tau_neg=0", "actor.tau_neg=0.0: must be positive"),
        ("actor.kl_cov_ratio=0", "actor.kl_cov_ratio=0.0: is a share of the tokens"),
        ("actor.clip_cov_lb=6", "actor.clip_cov_lb=6.0: leaves no covariance below clip_cov_ub=5"),
        ("actor.ppo_kl_coef=-1", "actor.ppo_kl_coef=-1.0: must not be negative"),
        ("actor.full_kl_gib=-1", "actor.full_kl_gib=-1.0: must not be negative"),
        ("actor.loss_agg_constant=0", "actor.loss_agg_constant=0.0: must be positive"),
        ("actor.optim.lr=-1", "actor.optim.lr=-1.0: must not be negative"),
        ("actor.optim.betas=[0.9]", "actor.optim.betas=[0.9]: there are two, and not 1"),
        ("actor.optim.betas=[0.9,1]", "actor.optim.betas[1]=1.0: must lie in [0, 1)"),
        ("actor.microbatch_tokens=null", "actor.microbatch_tokens=None: either this or microbatch_sequences"),
        ("algorithm=ppo critic.cliprange_value=-1", "critic.cliprange_value=-1.0: must not be negative"),
        (
            "algorithm=ppo critic.optim.lr_schedule=cosine",
            "critic.optim.total_steps=0: a cosine schedule must end after its 0 steps of warm-up. "
            "Write more than 0, or critic.optim.lr_schedule=constant",
        ),
        # rewards and the run
        ("reward.timeout_s=0", "reward.timeout_s=0.0: must be positive"),
        ("reward.overlong.penalty_factor=-1", "reward.overlong.penalty_factor=-1.0: would reward length"),
        (
            "reward.overlong.enable=true data.max_response_length=256",
            "reward.overlong.length=256: punishes every response, since data.max_response_length=256",
        ),
        ("trainer.nnodes=0", "trainer.nnodes=0: must be positive"),
        ("trainer.total_training_steps=0", "trainer.total_training_steps=0: must be positive"),
        ("trainer.profile_steps=[3,0]", "trainer.profile_steps=[3, 0]: steps count from 1"),
        ("trainer.device_peak_tflops=0", "trainer.device_peak_tflops=0.0: must be positive"),
        ("trainer.max_to_keep=0", "trainer.max_to_keep=0: must be positive"),
        ("trainer.save_freq=-1", "trainer.save_freq=-1: must not be negative"),
        ("trainer.resume_mode=path", "trainer.resume_from_path=None: says nothing, and trainer.resume_mode=path needs"),
        ("trainer.resume_from_path=x", "trainer.resume_from_path=x: goes with trainer.resume_mode=path only"),
        # rollout
        ("rollout.n=0", "rollout.n=0: must be positive"),
        ("rollout.val_kwargs.top_p=0", "rollout.val_kwargs.top_p=0.0: must lie in (0, 1]"),
    ],
)
def test_a_mistake_is_named_with_its_key(overrides: str, said: str) -> None:
    found = refusals(*overrides.split())
    assert len(found) == 1, found
    assert found[0].startswith(said), found
    assert found[0].count(". ") >= 1, "there is a remedy"


def test_the_critic_is_not_asked_where_there_is_none() -> None:
    assert refusals("critic.cliprange_value=-1", "critic.ppo_mini_batch_size=3") == []


def test_all_mistakes_are_named_at_once() -> None:
    written = {
        "model.path": "''", "data.train_files": "[]", "actor.ppo_mini_batch_size": "3", "rollout.n": "1",
        "algorithm.gamma": "2", "data.max_prompt_length": "0", "reward.timeout_s": "-1", "trainer.save_freq": "-1",
        "rollout.top_k": "0",
    }  # fmt: skip
    found = refusals(*(f"{key}={value}" for key, value in written.items()))
    assert {text.partition("=")[0] for text in found} == {*written, "rollout.max_prompt_length"}
