"""What is read and refused before a process is started: configuration, model, tokenizer, prompts, checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from mcore_rl.algorithms.kl import KlController
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.run import RunConfig, run_violations
from mcore_rl.controller import checkpoints
from mcore_rl.controller.checkpoints import Progress
from mcore_rl.controller.fit import model_run_violations
from mcore_rl.data.prompts import PromptSet
from mcore_rl.data.sampler import PromptSampler
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.errors import refuse_if_any
from mcore_rl.families.registry import model_of
from mcore_rl.parallel.device import Platform
from mcore_rl.rollout.admission import admit
from mcore_rl.runtime.placement import placement_violations
from mcore_rl.weights.companions import read_config


@dataclass(kw_only=True)
class Prepared:
    """What is known before a process is started."""

    tokenizer: PreTrainedTokenizerBase
    train: PromptSet | None
    validation: PromptSet | None
    sampler: PromptSampler
    num_steps: int
    model: ModelConfig
    progress: Progress
    checkpoint: Path | None
    kl: KlController

    def data_sources(self) -> Iterator[str]:
        """Of all prompts that will be graded."""
        for prompts in (self.train, self.validation):
            if prompts is not None:
                yield from (prompts[index].data_source for index in range(len(prompts)))


def complete(config: RunConfig) -> RunConfig:
    """``config`` with what follows from other fields written out, and paths that every process finds."""
    path = str(Path(config.model.path).resolve()) if config.model.path else ""
    place = str(Path(config.trainer.default_local_dir).resolve())
    longest = float(config.data.max_response_length)
    actor_constant, critic_constant = config.actor.loss_agg_constant, config.critic.loss_agg_constant
    return replace(
        config,
        model=replace(config.model, path=path),
        trainer=replace(config.trainer, default_local_dir=place),
        actor=replace(config.actor, loss_agg_constant=longest if actor_constant is None else actor_constant),
        critic=replace(
            config.critic,
            path=config.critic.path and str(Path(config.critic.path).resolve()),
            loss_agg_constant=longest if critic_constant is None else critic_constant,
        ),
    )


def prepare(config: RunConfig, platform: Platform) -> Prepared:
    """Read what must be read: configuration, model, tokenizer, prompts, the place to resume from.

    Raises ConfigError and kin with everything that keeps the run from starting.
    """
    refuse_if_any(run_violations(config))
    directory = Path(config.model.path)
    model = admit(directory, config.rollout, platform)
    critic = None
    if config.needs_critic:
        _, critic = model_of(read_config(Path(config.critic.path or config.model.path)))
    found = model_run_violations(config, model, critic)
    refuse_if_any([*found, *placement_violations(config.trainer, config.rollout.layout, platform)])
    tokenizer = load_tokenizer(config.model.tokenizer_path or directory)
    data = config.data
    train = validation = None
    if not config.trainer.val_only:
        files, title = data.train_files, "data.train_files"
        train = PromptSet.load(files, data, tokenizer, max_samples=data.train_max_samples, title=title)
    if data.val_files:
        files, title = data.val_files, "data.val_files"
        validation = PromptSet.load(files, data, tokenizer, max_samples=data.val_max_samples, title=title)
    sampler = PromptSampler(1 if train is None else len(train), data.seed, data.shuffle)
    num_steps = 0
    if train is not None:
        num_steps = config.trainer.total_training_steps or 0
        per_epoch = sampler.batches_per_epoch(data.train_batch_size)
        if data.gen_batch_size is not None:
            sampler.batches_per_epoch(data.gen_batch_size, "data.gen_batch_size")
        num_steps = num_steps or per_epoch * config.trainer.total_epochs
    kl, progress = KlController(config.algorithm.kl_ctrl), Progress()
    checkpoint = checkpoints.to_resume(config.trainer)
    if checkpoint is not None:
        progress = checkpoints.read_progress(checkpoint)
        sampler.load_state_dict(progress.sampler)
        kl.load_state_dict(progress.kl)
    return Prepared(
        tokenizer=tokenizer,
        train=train,
        validation=validation,
        sampler=sampler,
        num_steps=num_steps,
        model=model,
        progress=progress,
        checkpoint=checkpoint,
        kl=kl,
    )
