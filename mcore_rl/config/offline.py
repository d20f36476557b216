"""What the configurations of ``mcore-rl sft``, ``prefer`` and ``reward`` share: they learn from files alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import partial

from mcore_rl.config.bounds import CrossCheck, check
from mcore_rl.config.data import AnswersConfig, ImagesConfig, data_violations
from mcore_rl.config.engine import SharePrompts
from mcore_rl.config.lora import LoraConfig
from mcore_rl.config.preference import parted_pairs
from mcore_rl.config.recipe import RecipeConfig
from mcore_rl.config.role import Role
from mcore_rl.config.role_groups import RoleGroups, picture_violations
from mcore_rl.config.roles import AdaptedConfig
from mcore_rl.config.schedule import schedule_violations
from mcore_rl.config.trainer import Mode, PolicyModelConfig, RayInitConfig, TrainerConfig, trainer_violations
from mcore_rl.ground.errors import Violation


@dataclass(kw_only=True)
class OfflineConfig(RoleGroups):
    """All settings of a trainer without engines.  ``data.train_batch_size``: rows per optimizer step.

    The model that is trained is ``actor.*``, whatever it becomes.
    """

    recipe: RecipeConfig = field(default_factory=RecipeConfig)
    model: PolicyModelConfig = field(default_factory=PolicyModelConfig)
    data: AnswersConfig = field(default_factory=AnswersConfig)
    actor: AdaptedConfig = field(default_factory=AdaptedConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    ray_init: RayInitConfig = field(default_factory=RayInitConfig)

    @property
    def command(self) -> str:
        """The command that runs it."""
        raise NotImplementedError

    @property
    def sees_pictures(self) -> bool:
        """See ``RoleGroups.sees_pictures``."""
        return isinstance(self.data, ImagesConfig) and self.data.sees_pictures

    @property
    def trained(self) -> Role:
        """The role that is trained."""
        return next(role for role in self.role_rows if role.trains)

    @property
    def sequences_per_row(self) -> int:
        """The most sequences that a row of the data is trained as."""
        return 1

    @property
    def longest_sequence(self) -> int:
        """The most tokens that a sequence is trained with."""
        return self.data.max_length

    def rules(self) -> list[CrossCheck[OfflineConfig]]:
        """Contradictions that this command alone may have."""
        return []

    def violations(self, *, planned: bool = False) -> list[Violation]:
        """Every violation that can be seen without opening a file.  planned: nothing has to be there to train on."""
        rules: list[CrossCheck[OfflineConfig]] = [
            lambda config: data_violations(config.data),
            lambda config: trainer_violations(config.trainer),
            *(partial(_role_violations, role=role) for role in self.group_rows),
            _adapter_violations,
            _warmup_violations,
            _mode_violations,
            _sharing_violations,
            _picture_violations,
            *self.rules(),
            lambda config: schedule_violations(config, config.trainer.total_training_steps or 0),
            *(() if planned else (_missing,)),
        ]
        return check(self, rules)


def _role_violations(config: OfflineConfig, role: Role) -> list[Violation]:
    return config.role_config(role).violations(role.name)


def _adapter_violations(config: OfflineConfig) -> Iterator[Violation]:
    """Settings of adapters that there are none of; ``train`` has this from ``config/unread_keys.py``."""
    lora = config.actor.lora
    plain = LoraConfig()
    for each in () if lora.rank else fields(LoraConfig):
        value = getattr(lora, each.name)
        if value != getattr(plain, each.name):
            shown = value.value if isinstance(value, Enum) else value
            remedy = "Leave it out, or write actor.lora.rank=32"
            yield Violation(f"actor.lora.{each.name}", shown, "is not read: there are no adapters", remedy)


def _picture_violations(config: OfflineConfig) -> Iterator[Violation]:
    return picture_violations(config.data, {role.name: config.role_config(role) for role in config.group_rows})


def _warmup_violations(config: OfflineConfig) -> Iterator[Violation]:
    if config.trainer.critic_warmup:
        remedy = "Leave trainer.critic_warmup out"
        problem = f"{config.command} has no critic"
        yield Violation("trainer.critic_warmup", config.trainer.critic_warmup, problem, remedy)


def _mode_violations(config: OfflineConfig) -> Iterator[Violation]:
    if config.trainer.mode is not Mode.sync:
        remedy = "Leave trainer.mode out"
        problem = f"{config.command} draws no rollouts"
        yield Violation("trainer.mode", config.trainer.mode.value, problem, remedy)
    for name, value in (("record_rollouts", config.trainer.record_rollouts), ("replay", config.trainer.replay)):
        if value:
            key = f"trainer.{name}"
            yield Violation(key, value, f"{config.command} draws no rollouts", f"Leave {key} out")


def _sharing_violations(config: OfflineConfig) -> Iterator[Violation]:
    if config.actor.share_prompts is not SharePrompts.off:
        problem = f"{config.command} draws no samples of prompts"
        remedy = "Leave actor.share_prompts out"
        yield Violation("actor.share_prompts", config.actor.share_prompts.value, problem, remedy)


def pairs_violations(config: OfflineConfig) -> Iterator[Violation]:
    """Microbatches that no pair fits into."""
    yield from parted_pairs(config.actor.microbatch_sequences)


def _missing(config: OfflineConfig) -> Iterator[Violation]:
    if not config.model.path:
        yield Violation("model.path", "", "is not set", "Write model.path=DIR, a Hugging Face checkpoint")
    if not config.data.train_files:
        yield Violation("data.train_files", "[]", "there is nothing to train on", "Write data.train_files=[FILE]")
    trainer = config.trainer
    if (trainer.val_only or trainer.test_freq) and not config.data.val_files:
        asked = "trainer.val_only" if trainer.val_only else f"trainer.test_freq={trainer.test_freq}"
        yield Violation("data.val_files", "[]", f"{asked} needs some", "Write data.val_files=[FILE]")
