"""What trainers that learn from files alone share: reading, starting, and a run of one trained role."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from transformers import PreTrainedTokenizerBase

from mcore_rl.config.compose import as_dict
from mcore_rl.config.offline import OfflineConfig
from mcore_rl.config.schedule import schedule_violations, scheduled
from mcore_rl.controller.lifecycle.model_checks import (
    adapter_violations,
    demand_weights,
    model_offline_violations,
    sight_violations,
    unit_violations,
)
from mcore_rl.controller.lifecycle.model_directory import prepare_model
from mcore_rl.controller.lifecycle.preparation import (
    PreparedRun,
    demand_steps,
    to_resume,
    weights_of_roles,
    with_absolute_adapters,
)
from mcore_rl.controller.lifecycle.resume_check import Identity
from mcore_rl.controller.lifecycle.start_plan import doubts_of, forecast, tell_plan
from mcore_rl.controller.lifecycle.start_roles import start_roles
from mcore_rl.controller.programs.program import run_program, show_check
from mcore_rl.controller.step.utilization import Passes, tflop
from mcore_rl.controller.training_run import Callback, TrainingRun, begin_records, every_step, open_directory
from mcore_rl.data.media.placed import Placed
from mcore_rl.data.sampler import PromptSampler
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.errors import refuse_if_any
from mcore_rl.families.config_json import read_config
from mcore_rl.families.registry import model_of
from mcore_rl.parallel.device import detect
from mcore_rl.parallel.secret_store import StoreServer
from mcore_rl.runtime.cluster import meeting_host
from mcore_rl.runtime.placement import place_trainers
from mcore_rl.runtime.seen_paths import demand_seen
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
    place, path = Path(config.trainer.default_local_dir).resolve(), Path(config.model.path).resolve()
    config = replace(
        config,
        model=replace(config.model, path=str(path)),
        actor=with_absolute_adapters(config.actor),
        trainer=replace(config.trainer, default_local_dir=str(place)),
    )
    path, role = Path(config.model_directory), config.trained
    prepare_model(config.model, path, pictures=config.sees_pictures)
    refuse_if_any(list(sight_violations(config)))
    _, model = model_of(read_config(path), pictures=config.sees_pictures)
    refuse_if_any([*model_offline_violations(config, model), *adapter_violations(config)])
    demand_weights(path, role.head, pictures=config.sees_pictures)
    load = loader(config, load_tokenizer(config.model.tokenizer_path or path))
    data, trainer = config.data, config.trainer
    train = load(data.train_files, data.train_max_samples, "data.train_files")
    validation = load(data.val_files, data.val_max_samples, "data.val_files") if data.val_files else None
    for rows in (train, validation):
        refuse_if_any(list(unit_violations(config.trained.name, config.actor, [] if rows is None else rows.units)))
    sampler = PromptSampler(len(train), data.seed, data.shuffle)
    per_epoch = sampler.batches_per_epoch(data.train_batch_size)
    num_steps = 0 if trainer.val_only else trainer.total_training_steps or per_epoch * trainer.total_epochs
    refuse_if_any(list(schedule_violations(config, num_steps)))
    trained = [each.name for each in config.role_rows if each.trains]
    identity = Identity.of(as_dict(config), trained, weights_of_roles(config), train.media)
    checkpoint, progress = to_resume(config, identity, sampler)
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
        """Whether it validates before the first step: a fresh run, or one that does nothing else."""
        trainer = self.config.trainer
        begins = trainer.val_before_train and self.progress.step == 0
        return self.prepared.validation is not None and (trainer.val_only or begins)

    async def validate(self, step: int) -> dict[str, float]:
        """The metrics of ``judge``; nothing without validation data."""
        if self.prepared.validation is None:
            return {}
        self.tracker.now("validating")
        with self.clock("validate"):
            return await self.judge(self.prepared.validation)

    @abstractmethod
    async def judge(self, rows: D) -> dict[str, float]:
        """Metrics of the weights as they are, on rows that are not trained."""

    def passes(self, lengths_S: Sequence[int], scored: float = 0.0) -> dict[str, float]:
        """The FLOP of a step on these sequences, and notes their tokens.  scored: passes without backward."""
        self.num_tokens, role = sum(lengths_S), self.config.trained
        model = self.prepared.models[role.name]
        return tflop(lengths_S, [Passes(model=model, scored=scored, trained=1, head=role.head)])

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
        prepared, platform = self.prepare(config), detect(config.trainer.device)
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
            places = await place_trainers(config.trainer, platform)
            stack.callback(places.close)
            await demand_seen(weights_of_roles(config), places.nodes)
            store = stack.enter_context(StoreServer(meeting_host(config.ray_init))).access
            groups = await start_roles(config, prepared.checkpoint, places, platform, store, stack)
            begin_records(config, prepared, planned, tracker)
            run = self.run(config, platform, tracker, prepared, groups)
            stack.push_async_callback(run.saver.close)
            yield run
