"""Settings of reward models: what a loss does not read is refused, all of it at once, and what the plan is told."""

from __future__ import annotations

import pytest

from mcore_rl.config.compose import compose
from mcore_rl.config.reward_training import RewardTrainingConfig
from mcore_rl.config.role import Head
from mcore_rl.planning.plan import offline_work
from tests.support import models

SOUND = ("model.path=m", "data.train_files=[t]", "data.max_length=64", "data.train_batch_size=8")
PAIRS = ("data.margin_key=m", "actor.reward.centering_coef=0.01", "data.chosen_key=c", "data.rejected_key=r")
LABELS = ("data.label_key=l", "data.completion_key=c")


def settings(*words: str) -> RewardTrainingConfig:
    return compose(RewardTrainingConfig, "reward", [*SOUND, *words])


@pytest.mark.parametrize(
    ("loss", "read", "unread"),
    [("bradley_terry", PAIRS, LABELS), ("regression", LABELS, PAIRS), ("bce", LABELS, PAIRS)],
)
def test_what_a_loss_does_not_read_is_refused(loss: str, read: tuple[str, ...], unread: tuple[str, ...]) -> None:
    assert settings(f"actor.reward.loss={loss}", "data.weight_key=w", *read).violations() == []
    said = settings(f"actor.reward.loss={loss}", *unread).violations()
    assert sorted(each.key for each in said) == sorted(word.partition("=")[0] for word in unread)
    assert all(each.problem == f"is not read by {loss}" for each in said)
    others = {"bradley_terry": "regression or bce"}.get(loss, "bradley_terry")
    assert all(each.remedy == f"Leave it out, or write actor.reward.loss={others}" for each in said)


def test_pairs_are_not_parted() -> None:
    alone = ("actor.microbatch_sequences=1", "actor.microbatch_tokens=null")
    (said,) = settings(*alone).violations()
    assert said.key == "actor.microbatch_sequences"
    assert settings(*alone, "actor.reward.loss=bce").violations() == []


def test_the_plan_counts_both_answers_and_the_token_behind_each() -> None:
    model = models.dense()
    of_pairs = offline_work(settings(), model)
    of_labels = offline_work(settings("actor.reward.loss=bce"), model)
    assert (of_pairs.sequences, of_pairs.longest) == (16, 65) and (of_labels.sequences, of_labels.longest) == (8, 65)
    (role,) = settings().role_rows
    assert role.head is Head.value and role.trains and not role.publishes
