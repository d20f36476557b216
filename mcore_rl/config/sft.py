"""The configuration of ``mcore-rl sft``: supervised fine-tuning on conversations."""

from __future__ import annotations

from dataclasses import dataclass, field

from mcore_rl.config.data import SftDataConfig
from mcore_rl.config.offline import OfflineConfig
from mcore_rl.config.role import Role
from mcore_rl.config.roles import SeeingConfig

ACTOR = Role(
    name="actor",
    trains=True,
    weights="model.path",
    config=SeeingConfig,
    loss="mcore_rl.algorithms.cross_entropy:cross_entropy",
)


@dataclass(kw_only=True)
class SftConfig(OfflineConfig):
    """All settings of ``mcore-rl sft``.  ``data.train_batch_size``: conversations per optimizer step."""

    data: SftDataConfig = field(default_factory=SftDataConfig)
    actor: SeeingConfig = field(default_factory=SeeingConfig)

    @property
    def command(self) -> str:
        """See ``OfflineConfig.command``."""
        return "sft"

    @property
    def role_rows(self) -> tuple[Role, ...]:
        """The only role of such a run, the actor."""
        return (ACTOR,)
