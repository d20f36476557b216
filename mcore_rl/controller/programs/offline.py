"""What trainers that learn from files alone share: reading, starting, and a run of one trained role."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from transformers import PreTrainedTokenizerBase

from mcore_rl.config.offline import OfflineConfig
from mcore_rl.config.roles import trains_tower
from mcore_rl.config.schedule import schedule_violations, scheduled
from mcore_rl.controller.lifecycle.model_checks import (
    adapter_violations,
    demand_weights,
    model_offline_violations,
    prepare_model,
    sight_violations,
    unit_violations,
)
from mcore_rl.controller.lifecycle.preparation import (
    PreparedRun,
    absolute,
    demand_steps,
    to_resume,
    with_absolute_adapters,
)
from mcore_rl.controller.lifecycle.start_plan import doubts_of, forecast, tell_plan
from mcore_rl.controller.lifecycle.start_roles import start_trainers_alone
from mcore_rl.controller.programs.program import run_program, show_check
from mcore_rl.controller.step import updates
from mcore_rl.controller.step.utilization import Passes, tflop
from mcore_rl.controller.training_run import Callback, TrainingRun, begin_records, every_step, open_directory
from mcore_rl.data.media.placed import Placed
from mcore_rl.data.sampler import PromptSampler
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.families.config_json import read_config
from mcore_rl.families.registry import model_of
from mcore_rl.ground.errors import refuse_if_any
from mcore_rl.ground.types import Picture, TrainBatch
from mcore_rl.parallel.device import detect
from mcore_rl.runtime.shared_batch import SharedBatch
from mcore_rl.runtime.train_group import TrainGroup


class RowSet(Protocol):
    """RowSet of files, by number."""

    def __len__(self) -> int: ...

    @property
    def units(self) -> list[list[int]]:
        """Of each row, the tokens of the sequences that one microbatch must hold together."""
        ...

    @property
    def media(self) -> Sequence[Sequence[Placed]]:
        """The pictures of each row; empty where none are read."""
        ...


C = TypeVar("C", bound=OfflineConfig)
D = TypeVar("D", bound=RowSet)
# (files, the most samples or None, the key that names the files) -> rows
Load = Callable[[Sequence[str], int | None, str], D]


@dataclass(kw_only=True)
class PreparedOffline(PreparedRun, Generic[C, D]):
    """What such a trainer knows before it starts a process.  config: with absolute paths."""

    config: C
    train: D
    validation: D | None


def prepare(config: C, loader: Callable[[C, PreTrainedTokenizerBase], Load[D]]) -> PreparedOffline[C, D]:
    """Reads the model's configuration, the tokenizer and the data.  Raises McoreRLError with every violation found."""
    refuse_if_any(config.violations())
    config = replace(
        config,
        model=replace(config.model, path=absolute(config.model.path)),
        actor=with_absolute_adapters(config.actor),
        trainer=replace(config.trainer, default_local_dir=absolute(config.trainer.default_local_dir)),
    )
    path = Path(config.model_directory)
    role = config.trained
    prepare_model(config.model, path, pictures=config.sees_pictures)
    refuse_if_any(list(sight_violations(config)))
    _, model = model_of(read_config(path), pictures=config.sees_pictures)
    refuse_if_any([*model_offline_violations(config, model), *adapter_violations(config)])
    demand_weights(path, role.head, pictures=config.sees_pictures)
    load = loader(config, load_tokenizer(config.model.tokenizer_path or path))
    data = config.data
    trainer = config.trainer
    train = load(data.train_files, data.train_max_samples, "data.train_files")
    validation = load(data.val_files, data.val_max_samples, "data.val_files") if data.val_files else None
    for rows in (train, validation):
        refuse_if_any(list(unit_violations(config.trained.name, config.actor, [] if rows is None else rows.units)))
    sampler = PromptSampler(len(train), data.seed, data.shuffle)
    per_epoch = sampler.batches_per_epoch(data.train_batch_size)
    num_steps = 0 if trainer.val_only else trainer.total_training_steps or per_epoch * trainer.total_epochs
    refuse_if_any(list(schedule_violations(config, num_steps)))
    identity, checkpoint, progress = to_resume(config, sampler, train.media)
    prepared = PreparedOffline(
        config=scheduled(config, num_steps),
        train=train,
        validation=validation,
        sampler=sampler,
        progress=progress,
        checkpoint=checkpoint,
        identity=identity,
        models={role.name: model},
        num_steps=num_steps,
    )
    demand_steps(config.trainer, prepared)
    return prepared


class OfflineRun(TrainingRun[C, PreparedOffline[C, D]]):
    """One run of a trainer without engines; made by ``open_run``.  num_tokens: in the batch of the last step."""

    num_tokens = 0

    @property
    def group(self) -> TrainGroup:
        """The workers of the one role that is trained."""
        return self.groups[self.config.trained.name]

    @property
    def validates_first(self) -> bool:
        """As of any run, if there is something to validate with."""
        return self.prepared.validation is not None and super().validates_first

    async def validate(self, step: int) -> dict[str, float]:
        """The metrics of ``judge``; nothing without validation data."""
        if self.prepared.validation is None:
            return {}
        self.tracker.now("validating")
        with self.clock("validate"):
            return await self.judge(self.prepared.validation)

    def sent_to_score(self, batch: TrainBatch) -> SharedBatch:
        """Puts ``batch`` into Ray's store for passes alone; its first sequence is there again where ranks had none."""
        number = len(batch.lengths_S)
        short = max(0, self.group.layout.dp - number)
        full = batch.select([*range(number), *([0] * short)])
        return updates.send_whole(self.group, replace(full, pairs_S=None, extra_S={}))

    @abstractmethod
    async def judge(self, rows: D) -> dict[str, float]:
        """Metrics of the weights as they are, on rows that are not trained."""

    def passes(
        self,
        lengths_S: Sequence[int],
        scored: float = 0.0,
        images_S: Sequence[Sequence[Picture]] | None = None,
    ) -> dict[str, float]:
        """The FLOP of a step on these sequences and their pictures, and notes their tokens.

        scored: passes without backward.
        """
        self.num_tokens = sum(lengths_S)
        role = self.config.trained
        learns = trains_tower(self.config.actor)
        model = self.prepared.models[role.name]
        passes = Passes(model=model, scored=scored, trained=1, head=role.head, trains_tower=learns)
        return tflop(lengths_S, [passes], images_S=images_S)

    def rates(self, metrics: Mapping[str, float], seconds: Mapping[str, float]) -> dict[str, float]:
        """Tokens trained a second."""
        return {"perf/trained_tokens_per_s": self.num_tokens / seconds[f"time/{self.config.trained.update_phase}"]}


R = TypeVar("R", bound=OfflineRun[Any, Any])


@dataclass(frozen=True)
class OfflineProgram(Generic[C, D, R]):
    """A trainer without engines.  loader: reads its data.  run: its class of run.  step: trains one step."""

    loader: Callable[[C, PreTrainedTokenizerBase], Load[D]]
    run: type[R]
    step: Callable[[R, int], Any]

    def prepare(self, config: C) -> PreparedOffline[C, D]:
        """See the function ``prepare``."""
        return prepare(config, self.loader)

    async def train(self, config: C, callbacks: Sequence[Callback] = ()) -> int:
        """Train, validate, save, export to ``RUN/hf/final``; returns the exit code of ``run_program``."""

        async def step(run: R, number: int) -> dict[str, float]:
            run.tracker.now("training")
            metrics: dict[str, float] = await self.step(run, number)
            return metrics

        return await run_program(config, self.open, lambda run: every_step(run, step), callbacks)

    def check(self, config: C) -> int:
        """Read, check and plan all that a run needs, show the plan, and start nothing; returns the exit code 0."""
        prepared = self.prepare(config)
        platform = detect(config.trainer.device)
        planned = forecast(prepared.config, platform, prepared.models)
        show_check(config, prepared, planned, platform)
        return 0

    @asynccontextmanager
    async def open(self, config: C) -> AsyncIterator[R]:
        """While open: all processes of the run are up, with their first weights.  Afterwards none is left."""
        prepared = self.prepare(config)
        config = prepared.config
        platform = detect(config.trainer.device)
        planned = forecast(config, platform, prepared.models)
        tell_plan(planned, doubts_of(config, platform))
        async with AsyncExitStack() as stack:
            tracker = open_directory(config, prepared, platform, stack, stack)
            tracker.now("starting the trainer")
            groups = await start_trainers_alone(config, prepared.checkpoint, platform, stack)
            begin_records(config, prepared, planned, tracker)
            run = self.run(config, platform, tracker, prepared, groups)
            stack.push_async_callback(run.saver.close)
            yield run
