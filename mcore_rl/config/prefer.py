"""The configuration of ``mcore-rl prefer``: learning from answers of which some are preferred."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mcore_rl.config.bounds import CrossCheck
from mcore_rl.config.data import PreferenceDataConfig
from mcore_rl.config.offline import OfflineConfig, pairs_violations
from mcore_rl.config.preference import ROWS, PreferenceConfig, PreferenceLoss, preference_violations
from mcore_rl.config.role import Role
from mcore_rl.config.role_table import REF_LOGPROBS
from mcore_rl.config.roles import AdaptedConfig
from mcore_rl.ground.errors import Violation


@dataclass(kw_only=True)
class PreferredConfig(AdaptedConfig):
    """A policy that learns from preferences.  preference: see ``PreferenceConfig``."""

    preference: PreferenceConfig = field(default_factory=PreferenceConfig)

    def rules(self, key: str) -> list[CrossCheck[Any]]:
        """As ``RoleConfig.rules``."""
        return [*super().rules(key), partial(_preference_violations, key=key)]


def _preference_violations(config: PreferredConfig, key: str) -> Iterator[Violation]:
    yield from preference_violations(config.preference, f"{key}.preference.")


ACTOR = Role(
    name="actor",
    trains=True,
    weights="model.path",
    config=PreferredConfig,
    stages=lambda role, run: [role.update(REF_LOGPROBS, whole=True)],
    loss="mcore_rl.algorithms.preference:preferences_loss",
)
REFERENCE = Role(name="reference", shares="actor", phase="reference")


@dataclass(kw_only=True)
class PreferConfig(OfflineConfig):
    """All settings of ``mcore-rl prefer``.  ``data.train_batch_size``: pairs per optimizer step; with kto, rows."""

    data: PreferenceDataConfig = field(default_factory=PreferenceDataConfig)
    actor: PreferredConfig = field(default_factory=PreferredConfig)

    @property
    def command(self) -> str:
        """See ``OfflineConfig.command``."""
        return "prefer"

    @property
    def role_rows(self) -> tuple[Role, ...]:
        """The actor, and its first weights as the reference if the loss reads it."""
        return (ACTOR, REFERENCE) if self.actor.preference.row.reference else (ACTOR,)

    @property
    def sequences_per_row(self) -> int:
        """Both of a pair."""
        return 2

    def rules(self) -> list[CrossCheck[OfflineConfig]]:
        """See ``OfflineConfig.rules``."""
        rules: list[CrossCheck[OfflineConfig]] = [partial(_data_violations, prefer=self)]
        return [*rules, pairs_violations] if self.actor.preference.row.pairs else rules


def _data_violations(config: OfflineConfig, prefer: PreferConfig) -> Iterator[Violation]:
    data = prefer.data
    row = prefer.actor.preference.row
    name = prefer.actor.preference.loss.value
    if data.margin_key and not row.margins:
        reading = [loss.value for loss, each in ROWS.items() if each.margins]
        remedy = f"Leave it out, or write actor.preference.loss={' or '.join(reading)}"
        yield Violation("data.margin_key", data.margin_key, f"{name} knows no margins", remedy)
    if data.step_labels_key is not None:
        problem = "is of reward models"
        remedy = "Leave it out, or train one: mcore-rl reward actor.reward.loss=bce"
        yield Violation("data.step_labels_key", data.step_labels_key, problem, remedy)
    if prefer.actor.preference.loss is PreferenceLoss.kto and data.train_batch_size < 2:
        problem = "is too few: kto estimates the KL by the answers of other rows"
        yield Violation("data.train_batch_size", data.train_batch_size, problem, "Write 2 or more")
