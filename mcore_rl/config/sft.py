"""The configuration of ``mcore-rl sft``: supervised fine-tuning on conversations."""

from __future__ import annotations

from dataclasses import dataclass, field

from mcore_rl.config.data import SftDataConfig, data_violations
from mcore_rl.config.recipe import RecipeConfig
from mcore_rl.config.role import Role
from mcore_rl.config.role_groups import RoleGroups
from mcore_rl.config.roles import RoleConfig
from mcore_rl.config.trainer import ModelPathConfig, RayInitConfig, TrainerConfig, trainer_violations
from mcore_rl.errors import Violation

ACTOR = Role(
    name="actor",
    trains=True,
    weights="model.path",
    config=RoleConfig,
    loss="mcore_rl.algorithms.cross_entropy:cross_entropy",
)


@dataclass(kw_only=True)
class SftConfig(RoleGroups):
    """All settings of ``mcore-rl sft``.  ``data.train_batch_size``: conversations per optimizer step."""

    recipe: RecipeConfig = field(default_factory=RecipeConfig)
    model: ModelPathConfig = field(default_factory=ModelPathConfig)
    data: SftDataConfig = field(default_factory=SftDataConfig)
    actor: RoleConfig = field(default_factory=RoleConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    ray_init: RayInitConfig = field(default_factory=RayInitConfig)

    @property
    def role_rows(self) -> tuple[Role, ...]:
        """The only role of such a run, the actor."""
        return (ACTOR,)


def sft_violations(config: SftConfig) -> list[Violation]:
    """Every violation that can be seen without opening a file."""
    violations = [*data_violations(config.data), *trainer_violations(config.trainer)]
    for role in config.group_rows:
        violations += config.role_config(role).violations(role.name)
    if not config.model.path:
        violations.append(Violation("model.path", "", "is not set", "Write model.path=DIR, a Hugging Face checkpoint"))
    if not config.data.train_files:
        remedy = "Write data.train_files=[FILE]"
        violations.append(Violation("data.train_files", "[]", "there is nothing to train on", remedy))
    trainer = config.trainer
    if (trainer.val_only or trainer.test_freq) and not config.data.val_files:
        asked = "trainer.val_only" if trainer.val_only else f"trainer.test_freq={trainer.test_freq}"
        violations.append(Violation("data.val_files", "[]", f"{asked} needs some", "Write data.val_files=[FILE]"))
    if trainer.critic_warmup:
        remedy = "Leave trainer.critic_warmup out"
        violations.append(Violation("trainer.critic_warmup", trainer.critic_warmup, "sft has no critic", remedy))
    return violations
