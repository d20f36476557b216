"""One run of ``mcore-rl sft``, whole: supervised fine-tuning on conversations."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from mcore_rl.config.data import SftDataConfig, data_violations
from mcore_rl.config.engine import EngineConfig, engine_violations
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.config.recipe import RecipeConfig
from mcore_rl.config.trainer import ModelPathConfig, RayInitConfig, TrainerConfig, trainer_violations
from mcore_rl.errors import Violation


@dataclass(kw_only=True)
class SftActorConfig(EngineConfig):
    """The model that is trained: engine settings and layout."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)


@dataclass(kw_only=True)
class SftConfig:
    """What ``mcore-rl sft`` runs; data.train_batch_size: conversations of one optimizer step."""

    recipe: RecipeConfig = field(default_factory=RecipeConfig)
    model: ModelPathConfig = field(default_factory=ModelPathConfig)
    data: SftDataConfig = field(default_factory=SftDataConfig)
    actor: SftActorConfig = field(default_factory=SftActorConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    ray_init: RayInitConfig = field(default_factory=RayInitConfig)


def sft_violations(config: SftConfig) -> list[Violation]:
    """Everything wrong in ``config`` that can be told without opening a file."""
    found = [*data_violations(config.data), *trainer_violations(config.trainer)]
    found += [replace(each, key=f"actor.{each.key}") for each in engine_violations(config.actor)]
    if not config.model.path:
        found.append(Violation("model.path", "", "is not set", "Write model.path=DIR, a Hugging Face checkpoint"))
    if not config.data.train_files:
        remedy = "Write data.train_files=[FILE]"
        found.append(Violation("data.train_files", "[]", "there is nothing to train on", remedy))
    if config.trainer.test_freq and not config.data.val_files:
        asked = f"trainer.test_freq={config.trainer.test_freq}"
        found.append(Violation("data.val_files", "[]", f"{asked} needs some", "Write data.val_files=[FILE]"))
    return found
