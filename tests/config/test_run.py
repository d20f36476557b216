"""What is refused of ``mcore-rl train`` before a file is opened: by the key that the user wrote, and all at once."""

from __future__ import annotations

import copy
import pickle

import pytest

from mcore_rl.config.algorithm_registry import algorithms
from mcore_rl.config.compose import as_dict, compose
from mcore_rl.config.role import Head
from mcore_rl.config.run import RunConfig, run_violations

SOUND = ["model.path=m", "data.train_files=[t.parquet]", "data.val_files=[v.parquet]"]
ALGORITHMS = list(algorithms())
TOLD = {"distill": ["teacher.path=t"]}  # what a run of an algorithm must be told besides


def run_of(*overrides: str) -> RunConfig:
    return compose(RunConfig, "train", [*SOUND, *overrides])


def refusals(*overrides: str) -> list[str]:
    return [str(violation) for violation in run_violations(run_of(*overrides))]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_runs_with_a_model_and_data_alone(name: str) -> None:
    assert refusals(f"algorithm={name}", *TOLD.get(name, [])) == []


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_runs_with_short_responses_and_a_small_batch(name: str) -> None:
    small = ["data.train_batch_size=8", "data.max_response_length=600", "actor.ppo_mini_batch_size=8"]
    assert refusals(f"algorithm={name}", *small, *TOLD.get(name, [])) == []


def test_the_roles_that_an_algorithm_needs() -> None:
    needs = {name: run_of(f"algorithm={name}") for name in ALGORITHMS}
    assert {name for name, run in needs.items() if "critic" in run.roles} == {"ppo"}
    assert {name for name, run in needs.items() if "process_reward" in run.roles} == {"prime"}
    assert {name for name, run in needs.items() if "teacher" in run.roles} == {"distill"}
    assert {name for name, run in needs.items() if run.needs_greedy} == {"remax"}
    referring = {
        "grpo",
        "online_dpo",
        "raft",
        "raft_plus_plus",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "remax",
        "rloo",
        "spin",
    }
    assert {name for name, run in needs.items() if "reference" in run.roles} == referring
    assert {name: run.roles for name, run in needs.items()} == {each.name: each.roles for each in algorithms().values()}


def test_a_teacher_of_the_loss_gives_hidden_states() -> None:
    taught = ("algorithm=distill", "teacher.path=t")
    rows = {row.name: row for row in run_of(*taught, "algorithm.distill.divergence=jensen_shannon").role_rows}
    assert rows["teacher"].head is Head.hidden
    drawn = {row.name: row for row in run_of(*taught).role_rows}
    assert drawn["teacher"].head is Head.lm
    nobody = run_of("algorithm.distill.divergence=jensen_shannon")
    assert "teacher" not in nobody.roles and not nobody.algorithm.distill.in_loss


def test_what_one_key_says_holds_for_all_that_follow_it() -> None:
    run = run_of(
        "data.max_response_length=77",
        "trainer.device=cpu",
        "actor.precision=float32",
        "algorithm=opo",
        "algorithm.adv_estimator=gae",
    )
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
        (
            "algorithm=rloo actor.ppo_epochs=2",
            "actor.ppo_epochs=2: actor.loss_mode=policy_gradient has no ratio, and is right for 1 update of a batch",
        ),
        (
            "algorithm=gpg actor.ppo_mini_batch_size=512",
            "actor.ppo_mini_batch_size=512: is less than data.train_batch_size=1024: actor.loss_mode=gpg has no ratio",
        ),
        (
            "trainer.mode=one_step_off",
            "trainer.placement=colocated: engines and trainer take turns, and with trainer.mode=one_step_off both work "
            "at once. Write separate, or trainer.mode=sync",
        ),
        (
            "trainer.mode=async",
            "trainer.placement=colocated: engines and trainer take turns, and with trainer.mode=async both",
        ),
        (
            "algorithm=rloo trainer.mode=one_step_off trainer.placement=separate",
            "trainer.mode=one_step_off: trains batches of older weights than its own: "
            "actor.loss_mode=policy_gradient has no ratio",
        ),
        (
            "algorithm=rloo trainer.mode=async trainer.placement=separate",
            "trainer.mode=async: trains batches of older weights than its own: "
            "actor.loss_mode=policy_gradient has no ratio",
        ),
        ("data.gen_batch_size=7", "data.gen_batch_size=7: differs from data.train_batch_size=1024, and no groups"),
        (
            "algorithm=dapo data.gen_batch_size=8 algorithm.filter_groups.max_num_gen_batches=2",
            "data.gen_batch_size=8: times algorithm.filter_groups.max_num_gen_batches=2 is less than "
            "data.train_batch_size=1024",
        ),
        ("rollout.max_response_length=9", "rollout.max_response_length=9: differs from data.max_response_length=512"),
        (
            "rollout.return_routed_experts=true",
            "rollout.return_routed_experts=True: nobody would read the experts that it records. Write false; "
            "actor.router_replay=r3 lets engines record",
        ),
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
        (
            "algorithm=prime algorithm.filter_groups.lower=0.9",
            "algorithm.filter_groups.lower=0.9: exceeds upper=0.8: no group would be trained. Write lower=0.2",
        ),
        (
            "algorithm=prime process_reward.loss_agg_mode=token_mean",
            "process_reward.loss_agg_mode=token_mean: the loss is of whole responses, and its mean is over these",
        ),
        (
            "algorithm=gspo actor.loss_agg_mode=token_mean",
            "actor.loss_agg_mode=token_mean: actor.loss_mode=gspo is defined with another (arXiv:2507.18071)",
        ),
        ("algorithm=ppo rollout.temperature=0", "rollout.temperature=0: greedy samples are of no distribution"),
        (
            "algorithm.off_policy=decoupled rollout.top_p=0.9",
            "algorithm.off_policy=decoupled: with top_p or top_k",
        ),
        (
            "algorithm.rollout_correction.reject=seq_mean_k1 algorithm.rollout_correction.reject_upper=1.1 "
            "rollout.top_k=9",
            "algorithm.rollout_correction.reject=seq_mean_k1: with top_p or top_k",
        ),
        (
            "algorithm.off_policy=bypass rollout.top_k=5",
            "algorithm.off_policy=bypass: with top_p or top_k",
        ),
        (
            "rollout.quantization=fp8_block",
            "rollout.quantization=fp8_block: engines draw from rounded weights, and algorithm.off_policy=recompute "
            "trains as if the trainer had drawn. Write algorithm.off_policy=decoupled",
        ),
        (
            "algorithm=gpg algorithm.off_policy=bypass",
            "algorithm.off_policy=bypass: actor.loss_mode=gpg has no ratio",
        ),
        (
            "algorithm.off_policy=bypass algorithm.rollout_correction.level=sequence",
            "algorithm.rollout_correction.level=sequence: is not read: nothing weighs the loss",
        ),
        (
            "algorithm.rollout_correction.batch_normalize=true",
            "algorithm.rollout_correction.batch_normalize=True: is not read: nothing weighs the loss",
        ),
        (
            "algorithm.rollout_correction.reject=seq_mean_k1",
            "algorithm.rollout_correction.reject_upper=None: must be 1 or more, a ratio, with reject=seq_mean_k1",
        ),
        (
            "algorithm.rollout_correction.reject=seq_max_k3 algorithm.rollout_correction.reject_upper=0",
            "algorithm.rollout_correction.reject_upper=0.0: must be positive",
        ),
        (
            "algorithm.rollout_correction.reject=seq_max_k3 algorithm.rollout_correction.reject_upper=1 "
            "algorithm.rollout_correction.reject_lower=0.1",
            "algorithm.rollout_correction.reject_lower=0.1: is not read: k2 and k3 are never negative",
        ),
        (
            "algorithm.rollout_correction.reject=token_k1 algorithm.rollout_correction.reject_upper=2 "
            "algorithm.rollout_correction.reject_lower=1.5",
            "algorithm.rollout_correction.reject_lower=1.5: must lie in (0, 1]",
        ),
        (
            "algorithm.rollout_correction.reject_upper=2",
            "algorithm.rollout_correction.reject_upper=2.0: is not read: nothing is rejected",
        ),
        ("algorithm=rloo algorithm.kl_penalty=k3_plus", "algorithm.kl_penalty=k3_plus: differs in its gradient alone"),
        ("algorithm=gdpo algorithm.gdpo_reward_keys=[]", "algorithm.gdpo_reward_keys=[]: gdpo normalizes each part"),
        (
            "algorithm=gdpo algorithm.gdpo_reward_weights=[1,2,3]",
            "algorithm.gdpo_reward_weights=[1.0, 2.0, 3.0]: has 3 weights for 2 gdpo_reward_keys",
        ),
        (
            "algorithm=best_of_n algorithm.use_kl_in_reward=true",
            "algorithm.use_kl_in_reward=True: best_of_n treats equal scores alike, and a KL makes none equal",
        ),
        (
            "algorithm=distill",
            "teacher.path=None: is not set, and algorithm.distill.coef=1 learns from a teacher. Write teacher.path=DIR",
        ),
        (
            "algorithm=grpo teacher.path=t",
            "teacher.path=t: is not read: there is no teacher. Leave it out, or write algorithm.distill.coef=1",
        ),
        (
            "algorithm=grpo algorithm.distill.coef=1 teacher.path=t teacher.optim.lr=1",
            "teacher.optim.lr=1.0: is not read: the teacher is not trained",
        ),
        (
            "algorithm=distill teacher.path=t algorithm.use_kl_in_reward=true",
            "algorithm.use_kl_in_reward=True: none reads no reward, so that a KL in it would do nothing",
        ),
        (
            "algorithm=pkpo algorithm.pass_k=6 rollout.n=5",
            "algorithm.pass_k=6: is more than rollout.n=5. Write 5 or less, or rollout.n=6",
        ),
        ("algorithm=gdpo algorithm.use_kl_in_reward=true", "algorithm.use_kl_in_reward=True: gdpo reads the parts"),
        (
            "algorithm.off_policy=decoupled algorithm.rollout_correction.mode=mask "
            "algorithm.rollout_correction.lower=1.5",
            "algorithm.rollout_correction.lower=1.5: must lie in [0, 1]",
        ),
        ("trainer.critic_warmup=3", "trainer.critic_warmup=3: the actor alone is trained"),
        ("algorithm=ppo algorithm.gamma=1.1", "algorithm.gamma=1.1: must lie in [0, 1]"),
        ("algorithm=ppo algorithm.lam=-0.1", "algorithm.lam=-0.1: must lie in [0, 1]"),
        (
            "algorithm=remax algorithm.kl_penalty=full",
            "algorithm.kl_penalty=full: rewards are of the tokens",
        ),
        ("algorithm=remax algorithm.kl_ctrl.kl_coef=-1", "algorithm.kl_ctrl.kl_coef=-1.0: must not be negative"),
        (
            "algorithm=remax algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.target_kl=0",
            "algorithm.kl_ctrl.type=adaptive: an adaptive controller divides by target_kl=0.0",
        ),
        (
            "algorithm=dapo algorithm.filter_groups.max_num_gen_batches=0",
            "algorithm.filter_groups.max_num_gen_batches=0: must be positive",
        ),
        # roles
        ("actor.clip_ratio=-0.1", "actor.clip_ratio=-0.1: must not be negative"),
        ("actor.clip_ratio_c=1.2", "actor.clip_ratio_c=1.2: must exceed 1 + the upper clip range, 1.2"),
        ("actor.kl_loss_type=full actor.full_kl_gib=-1", "actor.full_kl_gib=-1.0: must not be negative"),
        ("algorithm=dr_grpo actor.loss_agg_constant=0", "actor.loss_agg_constant=0.0: must be positive"),
        (
            "algorithm=gmpo actor.loss_agg_mode=token_mean",
            "actor.loss_agg_mode=token_mean: actor.loss_mode=geo_mean is defined with another (arXiv:2507.20673)",
        ),
        ("algorithm=sapo actor.tau_neg=0", "actor.tau_neg=0.0: must be positive"),
        ("algorithm=kl_cov actor.kl_cov_ratio=0", "actor.kl_cov_ratio=0.0: must lie in (0, 1]"),
        ("algorithm=clip_cov actor.clip_cov_lb=6", "actor.clip_cov_lb=6.0: leaves no covariance below clip_cov_ub=5"),
        ("algorithm=kl_cov actor.ppo_kl_coef=-1", "actor.ppo_kl_coef=-1.0: must not be negative"),
        (
            "algorithm.masked_in_baseline=false",
            "algorithm.masked_in_baseline=False: is not read: no response is masked",
        ),
        ("actor.tau_pos=2", "actor.tau_pos=2.0: is not read: actor.loss_mode=ppo_clip has no use for it"),
        ("actor.optim.lr=-1", "actor.optim.lr=-1.0: must lie in [0, 1]"),
        ("actor.optim.betas=[0.9,1]", "actor.optim.betas[1]=1.0: must lie in [0, 1)"),
        ("actor.microbatch_tokens=null", "actor.microbatch_tokens=None: either this or microbatch_sequences"),
        ("algorithm=ppo critic.cliprange_value=-1", "critic.cliprange_value=-1.0: must not be negative"),
        (
            "algorithm=ppo critic.optim.lr_schedule=cosine critic.optim.total_steps=5 critic.optim.lr_warmup_steps=5",
            "critic.optim.total_steps=5: a cosine schedule must end after its 5 steps of warm-up. "
            "Write more than 5, or leave it out: it follows from the run",
        ),
        (
            "actor.optim.warmup_ratio=0.1 actor.optim.lr_warmup_steps=5",
            "actor.optim.warmup_ratio=0.1: and actor.optim.lr_warmup_steps=5 both say how long warm-up is",
        ),
        # rewards and the run
        ("reward.timeout_s=0", "reward.timeout_s=0.0: must be at least 0.001"),
        (
            "reward.overlong.enable=true reward.overlong.penalty_factor=-1",
            "reward.overlong.penalty_factor=-1.0: must not be negative",
        ),
        (
            "reward.overlong.enable=true reward.overlong.length=256 data.max_response_length=256",
            "reward.overlong.length=256: punishes every response, since data.max_response_length=256",
        ),
        ("trainer.nnodes=0", "trainer.nnodes=0: must be positive"),
        ("trainer.total_training_steps=0", "trainer.total_training_steps=0: must be positive"),
        ("trainer.profile_steps=[3,0]", "trainer.profile_steps[1]=0: must be positive"),
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
    messages = refusals(*overrides.split())
    assert len(messages) == 1, messages
    assert messages[0].startswith(said), messages
    assert messages[0].count(". ") >= 1, "there is a remedy"


def test_a_run_has_the_groups_of_its_roles_and_one_that_is_written() -> None:
    def groups(*overrides: str) -> set[str]:
        return {"critic", "teacher", "process_reward"} & as_dict(run_of(*overrides)).keys()

    assert (
        groups() == set() and groups("algorithm=ppo") == {"critic"} and groups("algorithm=prime") == {"process_reward"}
    )
    assert groups("algorithm.distill.coef=1") == {"teacher"} and groups("critic.optim.lr=1") == {"critic"}
    assert refusals("critic.optim.lr=1", "critic.cliprange_value=0.3") == [
        f"{each}: is not read: there is no critic. Leave it out, or write algorithm.adv_estimator=gae"
        for each in ("critic.cliprange_value=0.3", "critic.optim.lr=1.0")
    ]
    for name in ("grpo", "ppo"):
        travelled = pickle.loads(pickle.dumps(run := run_of(f"algorithm={name}")))
        assert travelled == run and type(travelled) is type(run) and copy.deepcopy(run) == run


def test_stale_updates_are_made_where_they_are_asked_for() -> None:
    asked = "actor.allow_stale_updates=true"
    assert refusals("algorithm=gpg", "actor.ppo_mini_batch_size=256", "actor.ppo_epochs=2", asked) == []
    apart = ("trainer.mode=one_step_off", "trainer.placement=separate")
    assert refusals("algorithm=gpg", *apart, asked) == refusals(*apart) == []
    turns = ("trainer.mode=async", "trainer.placement=separate", "async.max_staleness=0")
    assert refusals("algorithm=gpg", *turns) == refusals(*turns) == [], "no sample is of older weights"
    assert refusals("algorithm=gpg", *apart, "algorithm.off_policy=decoupled") == [], (
        "weights correct the sampler's age"
    )
    (refused,) = refusals("algorithm=gpg", "rollout.partial=true")
    assert refused.startswith("rollout.partial=true: ") and "older weights" in refused


def test_partial_rollouts_are_refused_where_they_mean_nothing() -> None:
    partial, apart = "rollout.partial=true", "trainer.placement=separate"
    assert refusals(partial) == refusals(partial, apart) == []
    assert refusals(partial, "rollout.over_sampling=2", "async.max_staleness=2") == []
    for wrong, key, remedy in (
        ((apart, "trainer.mode=async"), "rollout.partial", "async.partial_rollout=true"),
        ((apart, "trainer.mode=one_step_off"), "rollout.partial", "trainer.mode=async"),
        (("rollout.over_sampling=1.5",), "rollout.over_sampling", "async.max_staleness=2"),
        (("async.max_staleness=0",), "rollout.over_sampling", "rollout.partial=false"),
    ):
        (refused,) = run_violations(run_of(partial, *wrong))
        assert refused.key == key and remedy in refused.remedy


@pytest.mark.parametrize(
    ("key", "name", "said"),
    [
        ("algorithm.adv_estimator", "drgrpo", "Did you mean dr_grpo"),
        ("algorithm.adv_estimator", "zebra", "Choose one of best_of_n, best_worst, dr_grpo, gae, gdpo"),
        ("actor.loss_mode", "ppo_clap", "Did you mean ppo_clip?"),
        ("actor.loss_mode", "own.py:loss", "is a relative path"),
        ("actor.loss_mode", "/nowhere/own.py:loss", "there is no such file"),
    ],
)
def test_parts_that_are_not_there_are_named_beside_all_else(key: str, name: str, said: str) -> None:
    messages = refusals(f"{key}={name}", "trainer.nnodes=0")
    assert len(messages) == 2 and messages[1].startswith("trainer.nnodes=0")
    assert name in messages[0] and said in messages[0], messages[0]


def test_all_mistakes_are_named_at_once() -> None:
    written = {
        "model.path": "''", "data.train_files": "[]", "actor.ppo_mini_batch_size": "3", "rollout.n": "1",
        "actor.clip_ratio": "-2", "data.max_prompt_length": "0", "reward.timeout_s": "-1", "trainer.save_freq": "-1",
        "rollout.top_k": "0",
    }  # fmt: skip
    messages = refusals(*(f"{key}={value}" for key, value in written.items()))
    assert {text.partition("=")[0] for text in messages} == {*written, "rollout.max_prompt_length"}
