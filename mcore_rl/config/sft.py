"""The configuration of ``mcore-rl sft``: supervised fine-tuning on conversations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import partial

from mcore_rl.config.bounds import CrossCheck, check
from mcore_rl.config.data import SftDataConfig, data_violations
from mcore_rl.config.lora import LoraConfig
from mcore_rl.config.recipe import RecipeConfig
from mcore_rl.config.role import Role
from mcore_rl.config.role_groups import RoleGroups
from mcore_rl.config.roles import AdaptedConfig
from mcore_rl.config.schedule import schedule_violations
from mcore_rl.config.trainer import Mode, PolicyModelConfig, RayInitConfig, TrainerConfig, trainer_violations
from mcore_rl.errors import Violation

ACTOR = Role(
    name="actor",
    trains=True,
    weights="model.path",
    config=AdaptedConfig,
    loss="mcore_rl.algorithms.cross_entropy:cross_entropy",
)


@dataclass(kw_only=True)
class SftConfig(RoleGroups):
    """All settings of ``mcore-rl sft``.  ``data.train_batch_size``: conversations per optimizer step."""

    recipe: RecipeConfig = field(default_factory=RecipeConfig)
    model: PolicyModelConfig = field(default_factory=PolicyModelConfig)
    data: SftDataConfig = field(default_factory=SftDataConfig)
    actor: AdaptedConfig = field(default_factory=AdaptedConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    ray_init: RayInitConfig = field(default_factory=RayInitConfig)

    @property
    def role_rows(self) -> tuple[Role, ...]:
        """The only role of such a run, the actor."""
        return (ACTOR,)


def sft_violations(config: SftConfig, *, planned: bool = False) -> list[Violation]:
    """Every violation that can be seen without opening a file.  planned: nothing has to be there to train on."""
    rules: list[CrossCheck[SftConfig]] = [
        lambda config: data_violations(config.data),
        lambda config: trainer_violations(config.trainer),
        *(partial(_role_violations, role=role) for role in config.group_rows),
        _adapter_violations,
        _warmup_violations,
        _mode_violations,
        lambda config: schedule_violations(config, config.trainer.total_training_steps or 0),
        *(() if planned else (_missing,)),
    ]
    return check(config, rules)


def _role_violations(config: SftConfig, role: Role) -> list[Violation]:
    return config.role_config(role).violations(role.name)


def _adapter_violations(config: SftConfig) -> Iterator[Violation]:
    """Settings of adapters that there are none of; ``train`` has this from ``config/unread_keys.py``."""
    lora, plain = config.actor.lora, LoraConfig()
    for each in () if lora.rank else fields(LoraConfig):
        value = getattr(lora, each.name)
        if value != getattr(plain, each.name):
            shown = value.value if isinstance(value, Enum) else value
            remedy = "Leave it out, or write actor.lora.rank=32"
            yield Violation(f"actor.lora.{each.name}", shown, "is not read: there are no adapters", remedy)


def _warmup_violations(config: SftConfig) -> Iterator[Violation]:
    if config.trainer.critic_warmup:
        remedy = "Leave trainer.critic_warmup out"
        yield Violation("trainer.critic_warmup", config.trainer.critic_warmup, "sft has no critic", remedy)


def _mode_violations(config: SftConfig) -> Iterator[Violation]:
    if config.trainer.mode is not Mode.sync:
        yield Violation("trainer.mode", config.trainer.mode.value, "sft draws no rollouts", "Leave trainer.mode out")
    for name, value in (("record_rollouts", config.trainer.record_rollouts), ("replay", config.trainer.replay)):
        if value:
            key = f"trainer.{name}"
            yield Violation(key, value, "sft draws no rollouts", f"Leave {key} out")


def _missing(config: SftConfig) -> Iterator[Violation]:
    if not config.model.path:
        yield Violation("model.path", "", "is not set", "Write model.path=DIR, a Hugging Face checkpoint")
    if not config.data.train_files:
        yield Violation("data.train_files", "[]", "there is nothing to train on", "Write data.train_files=[FILE]")
    trainer = config.trainer
    if (trainer.val_only or trainer.test_freq) and not config.data.val_files:
        asked = "trainer.val_only" if trainer.val_only else f"trainer.test_freq={trainer.test_freq}"
        yield Violation("data.val_files", "[]", f"{asked} needs some", "Write data.val_files=[FILE]")
