"""A step leaves the policy's log-prob pass out where nothing needs it before the update, and only there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mcore_rl.config import step_plan as module
from mcore_rl.config.algorithm import Divergence
from mcore_rl.config.algorithm_registry import algorithms, estimator
from mcore_rl.config.compose import compose
from mcore_rl.config.role import Role
from mcore_rl.config.role_table import ROLES
from mcore_rl.config.roles import CriticConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.config.stages import OnController, OnRanks, Pass, StepStage, Update
from mcore_rl.config.step_plan import step_plan, why_scored
from mcore_rl.ground.errors import ConfigError

GRPO = ("algorithm=grpo", "data.train_batch_size=16", "actor.ppo_mini_batch_size=16")


def composed(*more: str) -> RunConfig:
    return compose(RunConfig, "train", [*GRPO, "model.path=m", "data.train_files=[t]", "data.val_files=[v]", *more])


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("actor.use_kl_loss=false",),
        ("actor.loss_mode=gspo", "actor.loss_agg_mode=seq_mean_token_mean"),
        ("actor.entropy_coeff=0.01",),
        ("algorithm.off_policy=bypass",),  # the sampler's stand for them, for whatever reads them
        ("algorithm.off_policy=bypass", "actor.ppo_epochs=2", "actor.ppo_mini_batch_size=4"),
        ("algorithm.off_policy=bypass", "algorithm.use_kl_in_reward=true"),
        ("algorithm.off_policy=bypass", "algorithm.distill.coef=0.5", "teacher.path=t"),
        ("algorithm.off_policy=bypass", "actor.loss_mode=clip_cov", "algorithm.mask_truncated=true"),
        ("algorithm.distill.coef=0.5", "algorithm.distill.divergence=forward_kl", "teacher.path=t"),
        ("algorithm.adv_estimator=gae",),
        ("algorithm.filter_groups.enable=true",),
    ],
)
def test_one_update_of_a_batch_scores_itself_and_bypass_needs_no_scores(more: tuple[str, ...]) -> None:
    assert why_scored(composed(*more)) is None


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (("actor.ppo_mini_batch_size=8",), "several updates"),
        (("actor.ppo_epochs=2",), "several updates"),
        (("algorithm.use_kl_in_reward=true",), "in the reward"),
        (("algorithm.distill.coef=0.5", "teacher.path=t"), "teacher"),
        (("algorithm.off_policy=decoupled",), "weighs the loss"),
        (("algorithm.off_policy=decoupled", "algorithm.rollout_correction.level=geometric"), "weighs the loss"),
        (
            (
                "algorithm.off_policy=bypass",
                "algorithm.rollout_correction.reject=seq_max_k3",
                "algorithm.rollout_correction.reject_upper=1",
            ),
            "reject",
        ),
        (
            ("algorithm.rollout_correction.reject=seq_mean_k1", "algorithm.rollout_correction.reject_upper=1.001"),
            "ratio",
        ),
        (("actor.loss_mode=clip_cov",), "selects"),
        (("actor.loss_mode=kl_cov",), "selects"),
        (("algorithm.mask_truncated=true",), "truncated"),
    ],
)
def test_what_reads_log_probs_before_the_update_keeps_the_pass(more: tuple[str, ...], reason: str) -> None:
    why = why_scored(composed(*more))
    assert why is not None and reason in why


@pytest.mark.parametrize("reads", [True, False])
def test_a_role_that_reads_old_log_probs_keeps_the_pass(reads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    read = "old_logprobs_T" if reads else "old_values_T"
    other = Role(
        name="process", weights="critic.path", config=CriticConfig, trains=True, loss="a:b",
        stages=lambda role, run: [role.update(read)],
    )  # fmt: skip
    run = composed()
    monkeypatch.setattr(RunConfig, "role_rows", property(lambda _: (ROLES["actor"], other)))
    assert (why_scored(run) is not None) == reads


def order(*words: str, trains_policy: bool = True) -> list[str]:
    """The stages of a step, by what they make and train."""
    run = compose(RunConfig, "train", ["model.path=m", *words])
    plan = step_plan(run, trains_policy=trains_policy)
    assert len({*plan}) == len(plan)
    return [f"update {each.role}" if isinstance(each, Update) else each.makes[0] for each in plan]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["algorithm=grpo", "actor.ppo_mini_batch_size=8"],
         ["old_logprobs_T", "ref_logprobs_T", "step_advantages", "update actor"]),
        (["algorithm=grpo", "actor.ppo_mini_batch_size=1024"], ["ref_logprobs_T", "step_advantages", "update actor"]),
        (["algorithm=ppo", "actor.ppo_mini_batch_size=8"],
         ["old_logprobs_T", "old_values_T", "step_advantages", "update critic", "update actor"]),
        (["algorithm=distill", "teacher.path=t"],
         ["old_logprobs_T", "teacher_logprobs_T", "step_advantages", "update actor"]),
        (["algorithm=prime", "actor.ppo_mini_batch_size=8"],
         ["old_logprobs_T", "process_ref_logprobs_T", "update process_reward", "process_logprobs_T", "process_stats",
          "process_scales", "token_rewards_T", "step_advantages", "update actor"]),
        (["algorithm=prime", "actor.ppo_mini_batch_size=8", "process_reward.update=after"],
         ["old_logprobs_T", "process_ref_logprobs_T", "process_logprobs_T", "update process_reward", "process_stats",
          "process_scales", "token_rewards_T", "step_advantages", "update actor"]),
    ],
)  # fmt: skip
def test_each_stage_comes_once_what_it_reads_is_made(words: list[str], expected: list[str]) -> None:
    assert order(*words) == expected


def test_while_a_critic_warms_up_the_policy_is_scored_and_not_trained() -> None:
    words = ("algorithm=ppo", "actor.ppo_mini_batch_size=1024")
    assert order(*words) == ["old_values_T", "step_advantages", "update critic", "update actor"]
    warming = ["old_logprobs_T", "old_values_T", "step_advantages", "update critic"]
    assert order(*words, trains_policy=False) == warming


@pytest.mark.parametrize("divergence", [each.value for each in Divergence])
@pytest.mark.parametrize("algorithm", ["distill", "ppo"])
def test_every_teacher_is_in_both_plans_of_a_run_that_read_it(algorithm: str, divergence: str) -> None:
    """A run makes the plan of its warm-up whether it has one or not."""
    taught = ["teacher.path=t", "algorithm.distill.coef=1", f"algorithm.distill.divergence={divergence}"]
    words = [f"algorithm={algorithm}", *taught]
    in_advantages = divergence == "drawn"
    made = "teacher_logprobs_T" if in_advantages else "teacher_hidden_MH"
    assert made in order(*words)
    assert (made in order(*words, trains_policy=False)) == in_advantages


@pytest.mark.parametrize("algorithm", algorithms())
def test_every_algorithm_has_both_plans(algorithm: str) -> None:
    words = (f"algorithm={algorithm}", "teacher.path=t")
    assert [each for each in order(*words, trains_policy=False) if each == "update actor"] == []
    assert order(*words)[-1] == "update actor"


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_model_that_is_scored_last_rests(when: str) -> None:
    """Its update lets it rest, wherever that is the last."""
    run = compose(RunConfig, "train", ["model.path=m", "algorithm=prime", f"process_reward.update={when}"])
    rests = [stage.makes[0] for stage in step_plan(run) if isinstance(stage, Pass) and stage.rests]
    assert rests == (["process_logprobs_T"] if when == "before" else [])


TOLD = Pass(role="told", group="actor", makes=("told_T",), phase="told_scores", context="a:d")
MAKES = OnController(function="a:b", reads=("never",), makes=("x",))


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ((MAKES,), "b reads never, which nothing in a step makes"),
        ((OnRanks(function="a:c", reads=(), makes=("alone_T",)),), "c makes alone_T, which nothing in a step reads"),
        (
            (replace(MAKES, reads=("y",)), OnRanks(function="a:c", reads=("x",), makes=("y",))),
            "stages wait for each other: b, c",
        ),
        ((replace(TOLD, makes=("teacher_hidden_MH",)),), "makes teacher_hidden_MH, and not log-probs or values"),
        ((replace(TOLD, makes=("told_T", "routing_TLK")),), "makes routing_TLK, and not log-probs or values"),
        ((replace(TOLD, role="teacher"),), "has the name of the teachers' own; give it another"),
    ],
)
def test_stages_that_cannot_run_are_refused(
    stages: tuple[StepStage, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = replace(estimator("rloo"), stages=stages)
    monkeypatch.setattr(module, "estimator", lambda _: own)
    with pytest.raises(ConfigError) as caught:
        order("algorithm=rloo")
    assert said in str(caught.value)
