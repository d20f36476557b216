"""A model that engines serve: the policy, a judge, a reward model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mcore_rl.config.lora import EngineAdapters
from mcore_rl.config.rollout import RolloutConfig, ServingConfig


@dataclass(frozen=True, kw_only=True)
class Served:
    """A row of the models that engines serve.

    name: its engines and their logs are called by it and a number.
    directory: its Hugging Face checkpoint.
    config: its engines, which generate if it is a ``RolloutConfig``, and classify else.
    follows_actor: its weights come with updates, before the first sample and after each restart, so that no engine
        reads the checkpoint's; else those are its weights, for good.
    adapters: that updates bring and every sample is drawn with; None: there are none.
    pictures: prompts may have some: a multimodal checkpoint is run as the whole, and not its text part alone.
    """

    name: str
    directory: Path
    config: ServingConfig
    follows_actor: bool = False
    adapters: EngineAdapters | None = None
    pictures: bool = False

    @property
    def generates(self) -> bool:
        """True if its engines draw samples, False if they score texts."""
        return isinstance(self.config, RolloutConfig)
