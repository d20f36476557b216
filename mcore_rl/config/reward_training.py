"""The configuration of ``mcore-rl reward``: training a reward model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mcore_rl.config.bounds import CrossCheck
from mcore_rl.config.data import PreferenceDataConfig
from mcore_rl.config.offline import OfflineConfig, pairs_violations
from mcore_rl.config.reward_loss import RewardLoss, RewardLossConfig, reward_loss_violations
from mcore_rl.config.role import Head, Role
from mcore_rl.config.roles import AdaptedConfig
from mcore_rl.errors import Violation


@dataclass(kw_only=True)
class TrainedRewardConfig(AdaptedConfig):
    """A reward model that is trained.  reward: see ``RewardLossConfig``."""

    reward: RewardLossConfig = field(default_factory=RewardLossConfig)

    def rules(self, key: str) -> list[CrossCheck[Any]]:
        """As ``RoleConfig.rules``."""
        return [*super().rules(key), partial(_reward_violations, key=key)]


def _reward_violations(config: TrainedRewardConfig, key: str) -> Iterator[Violation]:
    yield from reward_loss_violations(config.reward, f"{key}.reward.")


ACTOR = Role(
    name="actor",
    head=Head.value,
    trains=True,
    weights="model.path",
    config=TrainedRewardConfig,
    loss="mcore_rl.algorithms.reward_loss:scores_loss",
)


@dataclass(kw_only=True)
class RewardTrainingConfig(OfflineConfig):
    """All settings of ``mcore-rl reward``.  ``data.train_batch_size``: pairs or labelled answers per step."""

    data: PreferenceDataConfig = field(default_factory=PreferenceDataConfig)
    actor: TrainedRewardConfig = field(default_factory=TrainedRewardConfig)

    @property
    def command(self) -> str:
        """See ``OfflineConfig.command``."""
        return "reward"

    @property
    def role_rows(self) -> tuple[Role, ...]:
        """The only role of such a run: the model with its value head."""
        return (ACTOR,)

    @property
    def sequences_per_row(self) -> int:
        """Both of a pair."""
        return 2 if self.actor.reward.row.pairs else 1

    @property
    def longest_sequence(self) -> int:
        """With the token behind an answer (``data/scored_answers.py``)."""
        return self.data.max_length + 1

    def rules(self) -> list[CrossCheck[OfflineConfig]]:
        """See ``OfflineConfig.rules``."""
        rules: list[CrossCheck[OfflineConfig]] = [partial(_column_violations, training=self)]
        return [*rules, pairs_violations] if self.actor.reward.row.pairs else rules


def _column_violations(config: OfflineConfig, training: RewardTrainingConfig) -> Iterator[Violation]:
    """Columns that are named and not read."""
    loss, data, plain = training.actor.reward.loss, training.data, PreferenceDataConfig()
    pairs = training.actor.reward.row.pairs
    unread = ("completion_key", "label_key") if pairs else ("chosen_key", "rejected_key", "margin_key")
    if data.end_of_turn is not None:
        yield Violation(
            "data.end_of_turn", data.end_of_turn, "is not read: a reward model draws nothing", "Leave it out"
        )
    if data.step_labels_key is not None and loss is not RewardLoss.bce:
        remedy = "Leave it out, or write actor.reward.loss=bce"
        yield Violation("data.step_labels_key", data.step_labels_key, f"is not read by {loss.value}", remedy)
    elif data.step_labels_key is not None and data.label_key != plain.label_key:
        remedy = "Leave one of the two out"
        yield Violation("data.label_key", data.label_key, "is not read with data.step_labels_key", remedy)
    of_others = "regression or bce" if pairs else "bradley_terry"
    for name in unread:
        value = getattr(data, name)
        if value != getattr(plain, name):
            remedy = f"Leave it out, or write actor.reward.loss={of_others}"
            yield Violation(f"data.{name}", value, f"is not read by {loss.value}", remedy)
