"""A step leaves the policy's log-prob pass out where nothing needs it before the update, and only there."""

from __future__ import annotations

import pytest

from mcore_rl.config.compose import compose
from mcore_rl.config.old_logprobs import why_scored
from mcore_rl.config.role import Role
from mcore_rl.config.role_table import ROLES
from mcore_rl.config.roles import CriticConfig
from mcore_rl.config.run import RunConfig

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
    read = ("old_logprobs_T",) if reads else ("old_values_T",)
    other = Role(name="process", weights="critic.path", config=CriticConfig, trains=True, loss="a:b", reads=read)
    run = composed()
    monkeypatch.setattr(RunConfig, "role_rows", property(lambda _: (ROLES["actor"], other)))
    assert (why_scored(run) is not None) == reads
