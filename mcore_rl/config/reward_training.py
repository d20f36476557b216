"""The configuration of ``mcore-rl reward``, training a reward model, with its losses: one row each.

The functions of the losses are in ``algorithms/reward_loss.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from math import inf
from typing import Any

from mcore_rl.config.bounds import CrossCheck, NonNegativeFloat
from mcore_rl.config.data import PreferenceDataConfig
from mcore_rl.config.offline import OfflineConfig, pairs_violations
from mcore_rl.config.role import Head, Role
from mcore_rl.config.roles import AdaptedConfig
from mcore_rl.ground.errors import Violation


class RewardLoss(Enum):
    """What a score is fitted to: the better one of two answers, a number, or an outcome; ``ROWS`` has what each is."""

    bradley_terry = "bradley_terry"
    regression = "regression"
    bce = "bce"


@dataclass(frozen=True, kw_only=True)
class RewardLossRow:
    """What a loss of reward models is.

    formula: for docs/reward_training.md, in its notation.
    paper: the source of the formula.
    pairs: whether it looks at both answers of a pair; False: at one answer and its label.
    labels: the least and the greatest label that it reads.
    probabilities: whether its scores are log-odds, of a pair or of an outcome, so that they can be calibrated.
    """

    formula: str
    paper: str
    pairs: bool = False
    labels: tuple[float, float] = (-inf, inf)
    probabilities: bool = True


ROWS: dict[RewardLoss, RewardLossRow] = {
    RewardLoss.bradley_terry: RewardLossRow(
        formula="`-log sigma(r_w - r_l - m) + c (r_w + r_l)^2`",
        paper="arXiv:2203.02155, eq. 1; `m` (margins): arXiv:2307.09288, eq. 2; `c` (centering_coef): arXiv:2312.09244",
        pairs=True,
    ),
    RewardLoss.regression: RewardLossRow(
        formula="`(r - y)^2`",
        paper="arXiv:2406.08673",
        probabilities=False,
    ),
    RewardLoss.bce: RewardLossRow(
        formula="`-y log sigma(r) - (1 - y) log sigma(-r)`",
        paper="arXiv:2312.08935, eq. 1",
        labels=(0.0, 1.0),
    ),
}


@dataclass(kw_only=True)
class RewardLossConfig:
    """What a reward model is fitted to (docs/reward_training.md).

    loss: see ``RewardLoss``.
    centering_coef: with bradley_terry, weight of the squared sum of a pair's scores, which holds scores near 0; the
    paper has 0.01.
    """

    loss: RewardLoss = RewardLoss.bradley_terry
    centering_coef: NonNegativeFloat = 0.0

    @property
    def row(self) -> RewardLossRow:
        """What its loss is."""
        return ROWS[self.loss]


@dataclass(kw_only=True)
class TrainedRewardConfig(AdaptedConfig):
    """A reward model that is trained.  reward: see ``RewardLossConfig``."""

    reward: RewardLossConfig = field(default_factory=RewardLossConfig)

    def rules(self, key: str) -> list[CrossCheck[Any]]:
        """As ``RoleConfig.rules``."""
        return [*super().rules(key), partial(_loss_violations, key=key)]


def _loss_violations(config: TrainedRewardConfig, key: str) -> Iterator[Violation]:
    """Settings that the loss does not read."""
    loss = config.reward
    if loss.centering_coef and not loss.row.pairs:
        remedy = f"Leave it out, or write {key}.reward.loss=bradley_terry"
        problem = f"is not read by {loss.loss.value}"
        yield Violation(f"{key}.reward.centering_coef", loss.centering_coef, problem, remedy)


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
    loss = training.actor.reward.loss
    data = training.data
    plain = PreferenceDataConfig()
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
