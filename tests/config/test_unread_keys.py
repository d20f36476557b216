"""A key that the user wrote and that nothing reads is refused, with what would read it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mcore_rl.config.algorithm_registry import estimators, policy_losses
from mcore_rl.config.compose import compose
from mcore_rl.config.launch import load_recipe, recipe_names
from mcore_rl.config.run import RunConfig, any_run_schema, run_violations
from mcore_rl.config.typed import all_keys
from mcore_rl.config.unread_keys import switches
from mcore_rl.ground.errors import Violation
from tests.support.composed import recipe

SOUND = ["model.path=m", "data.train_files=[t.parquet]", "data.val_files=[v.parquet]"]


def refused(*overrides: str) -> list[Violation]:
    return run_violations(compose(RunConfig, "train", [*SOUND, *overrides]))


# What is written -> what is said of it, and what it takes to be read.
CASES = {
    "custom_reward_function={path: r.py, functions: [f], name: g}": (
        "custom_reward_function.functions are there instead of it", "custom_reward_function.functions=[]",
    ),
    "custom_reward_function.completions=text": (
        "there is no function of your own", "custom_reward_function.path=r.py",
    ),
    "algorithm=dapo actor.kl_loss_coef=0.001": ("there is no KL in the loss", "actor.use_kl_loss=true"),
    "algorithm=dapo actor.kl_loss_type=k3": ("there is no KL in the loss", "actor.use_kl_loss=true"),
    "algorithm.distill.divergence=forward_kl": ("there is no teacher", "algorithm.distill.coef=1"),
    "algorithm.distill.coef=1 teacher.path=t algorithm.distill.divergence=forward_kl algorithm.distill.jsd_beta=0.1": (
        "nothing is mixed", "algorithm.distill.divergence=jensen_shannon",
    ),
    "actor.full_kl_gib=9": ("no logits of the reference are kept", "actor.kl_loss_type=full"),
    "algorithm.kl_ctrl.kl_coef=0.01": ("there is no KL in the reward", "algorithm.use_kl_in_reward=true"),
    "algorithm.kl_penalty=k1": ("there is no KL in the reward", "algorithm.use_kl_in_reward=true"),
    "algorithm=rloo algorithm.kl_ctrl.target_kl=1": ("the coefficient is fixed", "algorithm.kl_ctrl.type=adaptive"),
    "algorithm.lam=0.95": ("algorithm.adv_estimator=grpo has no use for it", "algorithm=ppo"),
    "algorithm=reinforce_plus_plus algorithm.lam=0.9": ("has no use for it", "algorithm=ppo"),
    "algorithm=rloo algorithm.gamma=0.9": ("algorithm.adv_estimator=rloo has no use for it", "algorithm=ppo"),
    "algorithm=ppo algorithm.whiten_advantages=true": ("the estimator whitens", "algorithm.adv_estimator=remax"),
    "algorithm=opo actor.clip_ratio=0.1": ("policy_gradient has no use for it", "actor.loss_mode=ppo_clip"),
    "algorithm=gspo actor.clip_ratio_c=9": ("actor.loss_mode=gspo has no use for it", "algorithm=dapo"),
    "algorithm=dapo actor.clip_ratio=0.1": ("are both there instead of it", "actor.clip_ratio_low=null"),
    "actor.shuffle=false": ("there is one pass over the samples", "actor.ppo_epochs=2"),
    "rollout.allow_uncorrected=true": ("engines hold plain weights", "rollout.quantization=fp8_block"),
    "actor.allow_stale_updates=true": ("the loss has a ratio", "algorithm=gpg"),
    "async.max_staleness=2": ("trainer.mode itself says", "trainer.mode=async"),
    "trainer.mode=async trainer.placement=separate async.max_staleness=0 async.overdue=redraw": (
        "nothing is drawn ahead", "async.max_staleness=1",
    ),
    "trainer.mode=async trainer.placement=separate async.max_staleness=0 async.partial_rollout=false": (
        "nothing is drawn ahead", "async.max_staleness=1",
    ),
    "rollout.partial=true async.overdue=redraw": ("nothing is drawn while the trainer works", "trainer.mode=async"),
    "async.partial_rollout=false": ("nothing is drawn while the trainer works", "trainer.mode=async"),
    "rollout.over_sampling=1": ("a step waits for all groups that it begins", "rollout.partial=true"),
    "actor.loss_agg_constant=9": ("divides by no constant", "actor.loss_agg_mode=sum_over_constant"),
    "critic.optim.lr=1e-5": ("there is no critic", "algorithm=ppo"),
    "process_reward.update=after": ("there is no process_reward", "algorithm=prime"),
    "algorithm.process_coef=2": ("algorithm.adv_estimator=grpo has no use for it", "algorithm.adv_estimator=prime"),
    "reward.code.first_cases=10": ("all test cases must pass", "reward.code.continuous=true"),
    "algorithm.filter_groups.lower=0.2": ("no groups are filtered", "algorithm.filter_groups.enable=true"),
    "critic.parallel={tp: 2}": ("there is no critic", "algorithm=ppo"),
    "algorithm=ppo critic.loss_agg_constant=9": ("divides by no", "critic.loss_agg_mode=sum_over_constant"),
    "algorithm=ppo critic.shuffle=false": ("there is one pass over the samples", "critic.ppo_epochs=2"),
    "algorithm.filter_groups.max_num_gen_batches=3": ("no groups are filtered", "algorithm.filter_groups.enable=true"),
    "algorithm.filter_groups.metric=score": ("no groups are filtered", "algorithm.filter_groups.enable=true"),
    "algorithm=rloo algorithm.kl_ctrl.target_kl_per=response": (
        "the coefficient is fixed", "algorithm.kl_ctrl.type=adaptive",
    ),
    "algorithm.masked_in_baseline=false": ("no response is masked", "algorithm.mask_truncated=true"),
    "algorithm=remax algorithm.mask_truncated=true algorithm.masked_in_baseline=false": (
        "neither the estimator nor a filter", "algorithm.filter_groups.enable=true",
    ),
    "algorithm.gdpo_reward_keys=[acc]": ("algorithm.adv_estimator=grpo has no use for it", "algorithm=gdpo"),
    "actor.tau_pos=2": ("actor.loss_mode=ppo_clip has no use for it", "algorithm=sapo"),
    "algorithm=kl_cov actor.clip_ratio=0.3": ("actor.loss_mode=kl_cov has no use for it", "actor.loss_mode=ppo_clip"),
    "algorithm=clip_cov actor.ppo_kl_coef=2": ("clip_cov has no use for it", "algorithm=kl_cov"),
    "algorithm.rollout_correction.upper=3": ("nothing weighs the loss", "algorithm.off_policy=decoupled"),
    "algorithm.off_policy=bypass algorithm.rollout_correction.level=token": (
        "nothing weighs the loss", "algorithm.off_policy=decoupled",
    ),
    "algorithm.rollout_correction.batch_normalize=true": (
        "nothing weighs the loss", "algorithm.off_policy=decoupled",
    ),
    "algorithm.rollout_correction.reject_upper=1.1": (
        "nothing is rejected", "algorithm.rollout_correction.reject=seq_mean_k1",
    ),
    "algorithm.rollout_correction.reject=seq_max_k3 algorithm.rollout_correction.reject_upper=1 "
    "algorithm.rollout_correction.reject_lower=0.1": (
        "bounded from above alone", "algorithm.rollout_correction.reject=token_k1",
    ),
    "algorithm.off_policy=decoupled algorithm.rollout_correction.lower=0.1": (
        "truncation has no lower bound", "algorithm.rollout_correction.mode=mask",
    ),
    "reward.overlong.length=9": ("long responses are not punished", "reward.overlong.enable=true"),
}  # fmt: skip


@pytest.mark.parametrize("written", CASES)
def test_a_key_that_is_not_read_is_refused(written: str) -> None:
    *others, last = written.split(" ") if "{" not in written else [written]
    key, (problem, switch) = last.partition("=")[0], CASES[written]
    (violation,) = refused(*others, last)
    assert violation.key == key or violation.key.startswith(f"{key}.")
    assert violation.problem.startswith("is not read: ") and problem in violation.problem
    assert violation.remedy.startswith("Leave it out, or write ")
    assert refused(*others) == [], "it is this key"
    read = refused(*others, last, switch)
    assert key not in [each.key for each in read], "with that it is read"


def test_one_violation_for_each() -> None:
    violations = refused(
        "algorithm=dapo", "algorithm.lam=0.9", "actor.kl_loss_coef=1", "critic.path=c", "trainer.nnodes=0"
    )
    assert sorted(each.key for each in violations) == [
        "actor.kl_loss_coef", "algorithm.lam", "critic.path", "trainer.nnodes",
    ]  # fmt: skip


def test_a_value_that_nobody_wrote_disturbs_nobody() -> None:
    run = compose(RunConfig, "train", [*SOUND, "algorithm=dapo"])
    run.actor.kl_loss_coef, run.algorithm.lam = 0.5, 0.5
    assert run_violations(run) == []


def test_what_was_written_is_known_after_a_field_is_replaced() -> None:
    run = compose(RunConfig, "train", [*SOUND, "algorithm.lam=0.9"])
    assert [each.key for each in run_violations(replace(run, data=run.data))] == ["algorithm.lam"]


def test_every_key_of_the_rules_is_a_key() -> None:
    known = set(all_keys(any_run_schema()))
    keys = {key.rstrip(".") for switch in switches() for key in switch.keys}
    keys |= {key for part in (*estimators().values(), *policy_losses().values()) for key in part.own_keys}
    assert len(keys) > 20 and keys <= known


@pytest.mark.parametrize("name", [name for name in recipe_names() if "sft" not in name.split("_")])
def test_a_recipe_writes_no_key_that_it_does_not_read(name: str) -> None:
    run = recipe(name)
    assert isinstance(run, RunConfig)
    assert len(run.written) > 10 and run_violations(run) == []


def test_a_recipe_of_ones_own_is_told(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [train, _self_]\nalgorithm: {lam: 1.0}\n")
    run = load_recipe(str(tmp_path / "mine.yaml"), SOUND)
    assert isinstance(run, RunConfig)
    assert [each.key for each in run_violations(run)] == ["algorithm.lam"], "although it is the default"
