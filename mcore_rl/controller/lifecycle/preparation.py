"""Reads and checks all that a run needs before a process starts: configuration, model, tokenizer, data, checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from mcore_rl.agents.runner import PROGRAM, AgentRunner
from mcore_rl.algorithms.kl import KlController
from mcore_rl.config.algorithm_registry import estimator
from mcore_rl.config.compose import as_dict
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.offline import OfflineConfig
from mcore_rl.config.pairs import needs_answers, trains_pairs
from mcore_rl.config.placement import with_replicas
from mcore_rl.config.reward import Style
from mcore_rl.config.reward_model import style_violations
from mcore_rl.config.roles import (
    AdaptedConfig,
    FrozenModelConfig,
    RoleConfig,
    RouterReplay,
    TeacherConfig,
    TrainedConfig,
    TrainedModelConfig,
)
from mcore_rl.config.router_replay import replay_model_violations
from mcore_rl.config.run import RunConfig, run_violations
from mcore_rl.config.schedule import schedule_violations
from mcore_rl.config.stages import OnController
from mcore_rl.config.trainer import ResumeMode, TrainerConfig
from mcore_rl.controller.lifecycle import run_checkpoints
from mcore_rl.controller.lifecycle.judge_engines import PATH, prepare_judge
from mcore_rl.controller.lifecycle.kept_rollouts import draw_settings, kept_rollouts
from mcore_rl.controller.lifecycle.messages import warn
from mcore_rl.controller.lifecycle.model_checks import (
    adapter_violations,
    answer_violations,
    demand_weights,
    model_run_violations,
    patch_violations,
    prepare_model,
    sight_violations,
    teacher_violations,
    unit_violations,
    vocabulary_violations,
)
from mcore_rl.controller.lifecycle.replay_check import settings_sum
from mcore_rl.controller.lifecycle.resume_check import Identity
from mcore_rl.controller.lifecycle.run_checkpoints import Progress, complete_checkpoints
from mcore_rl.controller.rollouts.kept_draws import KeptDraws
from mcore_rl.controller.step.reward_model import Encoder, prepare_encoder, template_problem
from mcore_rl.data.answers import OwnAnswers
from mcore_rl.data.media.placed import Placed
from mcore_rl.data.media.prompts import PictureReader, picture_reader
from mcore_rl.data.prompts import PromptRow, PromptSet
from mcore_rl.data.rows import named
from mcore_rl.data.sampler import PromptSampler
from mcore_rl.data.tokenizer import end_tokens, load_tokenizer
from mcore_rl.data.turns import Turns
from mcore_rl.families.config_json import read_config
from mcore_rl.families.registry import model_of
from mcore_rl.families.same_architecture import architecture_violations
from mcore_rl.ground.errors import ConfigError, Violation, refuse_if_any
from mcore_rl.parallel.device import Platform
from mcore_rl.rollout.prompt_pictures import PictureShelf
from mcore_rl.rollout.vllm.engine.admission import admit, why_unrecorded
from mcore_rl.runtime.placement import placement_violations
from mcore_rl.tracking.run_directory import finished_step

A = TypeVar("A", bound=AdaptedConfig)
S = TypeVar("S", str, str | None)


@dataclass(kw_only=True)
class PreparedRun:
    """What every trainer knows before a process is started.

    sampler: of the training data.
    num_steps: the steps of the whole run.
    models: the model of each role with a worker group, by the role's name, the policy's first.
    progress: the state of the run in ``checkpoint``.
    checkpoint: the one to resume from; None: a fresh run.
    identity: decides whether a checkpoint is of this run.
    """

    sampler: PromptSampler
    num_steps: int
    models: dict[str, ModelConfig]
    progress: Progress
    checkpoint: Path | None
    identity: Identity


@dataclass(kw_only=True)
class Prepared(PreparedRun):
    """What ``train`` knows besides.

    encoder: of the reward model; None without one.
    judge_tokenizer: of a judge on engines of the run; None without one.
    agents: run the rows that ask for an agent.
    data_sources: those of the prompts that graders grade.
    draw_settings: on which it depends what is drawn and how it is graded.
    kept: rollouts of the checkpoint that were drawn and not trained, to go on with; None: there are none.
    settings_sum: of the settings that a replay may not change.
    shelf: has the pictures of all rows; None: no row has some.
    """

    tokenizer: PreTrainedTokenizerBase
    train: PromptSet | None
    validation: PromptSet | None
    kl: KlController
    encoder: Encoder | None
    judge_tokenizer: PreTrainedTokenizerBase | None
    agents: AgentRunner
    data_sources: frozenset[str]
    draw_settings: dict[str, Any]
    kept: KeptDraws | None
    settings_sum: str
    shelf: PictureShelf | None


def to_resume(
    config: RunConfig | OfflineConfig, sampler: PromptSampler, media: Sequence[Sequence[Placed]]
) -> tuple[Identity, Path | None, Progress]:
    """(what the run is, the checkpoint to resume from if any, its progress); moves ``sampler`` to the place there.

    media: the pictures of each training row.  Raises as ``Identity.check``.
    """
    trained = [role.name for role in config.role_rows if role.trains]
    identity = Identity.of(as_dict(config), trained, weights_of_roles(config), media)
    checkpoint = run_checkpoints.to_resume(config.trainer, warn)
    if checkpoint is None:
        return identity, None, Progress()
    identity.check(checkpoint)
    progress = run_checkpoints.read_progress(checkpoint)
    if not config.trainer.val_only:
        sampler.load_state_dict(progress.sampler)
    return identity, checkpoint, progress


class FinishedError(ConfigError):
    """The run in this directory has taken all its steps and exported its weights."""


def demand_steps(trainer: TrainerConfig, prepared: PreparedRun) -> None:
    """Raises ConfigError where no step is left, and a start would only rewrite the record of those that were taken.

    FinishedError, if the run that took them has ended well.
    A run that died between its last step and the export of its weights may go on, with the settings that it had.
    """
    key = "trainer.default_local_dir"
    directory = Path(trainer.default_local_dir)
    step = prepared.progress.step
    if trainer.val_only:
        if trainer.resume_mode is not ResumeMode.off and complete_checkpoints(directory):
            problem = "holds a run, whose record a validation would replace"
            remedy = "Give another directory; model.path=RUN/hf/final names the weights of a finished run"
            raise ConfigError([Violation(key, directory, problem, remedy)])
        return
    if prepared.checkpoint is None or step < prepared.num_steps:
        return
    finished = finished_step(directory) is not None
    if finished:
        problem = f"this run is finished: it was trained to step {step}, and no step is left"
    elif trainer.resume_mode is ResumeMode.auto and not prepared.identity.check(prepared.checkpoint):
        return
    else:
        problem = f"{prepared.checkpoint.name} is trained, and of {prepared.num_steps} steps none is left"
    remedy = "Give another directory, or begin anew there with trainer.resume_mode=off. More steps go on from there: "
    remedy += "trainer.total_training_steps or trainer.total_epochs"
    raise (FinishedError if finished else ConfigError)([Violation(key, directory, problem, remedy)])


def weights_of_roles(config: RunConfig | OfflineConfig) -> dict[str, Path]:
    """The Hugging Face checkpoints of the roles' first weights, by the configuration keys that name them."""
    return {key: Path(directory) for role in config.role_rows for key, directory in config.checkpoints_of(role).items()}


def models_of(config: RunConfig) -> dict[str, Path]:
    """Every model that processes of the run open, by key."""
    judge = config.reward_model
    more = {"reward_model.model.path": Path(judge.model.path)} if judge.enable else {}
    served = config.reward.judge.path
    return weights_of_roles(config) | more | ({} if served is None else {PATH: Path(served)})


def complete(config: RunConfig, platform: Platform) -> RunConfig:
    """``config`` with the defaults that follow from other fields and from ``platform``, and with absolute paths."""
    config = with_replicas(config, on_accelerators=platform.is_accelerator)
    longest = float(config.data.max_response_length)
    served = config.reward.judge
    judge = config.reward_model
    room = config.data.max_prompt_length + config.data.max_response_length
    roles = {role.name: _complete_role(config.role_config(role), longest) for role in config.group_rows}
    return replace(
        config.with_groups(roles),
        model=replace(config.model, path=absolute(config.model.path)),
        trainer=replace(
            config.trainer,
            default_local_dir=absolute(config.trainer.default_local_dir),
            replay=absolute(config.trainer.replay),
        ),
        reward=replace(
            config.reward, judge=replace(served, path=served.path and str(Path(served.path).expanduser().resolve()))
        ),
        reward_model=replace(
            judge,
            model=replace(judge.model, path=absolute(judge.model.path)),
            max_length=room if judge.max_length is None else judge.max_length,
        ),
    )


def absolute(path: S) -> S:
    """``path`` as it means the same in every process; one that is not set stays so."""
    return path and str(Path(path).resolve())


def with_absolute_adapters(config: A) -> A:
    """``config`` with its adapters' path absolute."""
    return replace(config, lora=replace(config.lora, path=absolute(config.lora.path)))


def _complete_role(config: RoleConfig, longest: float) -> RoleConfig:
    """longest: the most tokens of a response."""
    if isinstance(config, (FrozenModelConfig, TrainedModelConfig)):
        config = replace(config, path=absolute(config.path))
    if isinstance(config, TeacherConfig):
        config = replace(config, by_source={source: absolute(each) for source, each in config.by_source.items()})
    if isinstance(config, AdaptedConfig):
        config = with_absolute_adapters(config)
    if isinstance(config, TrainedConfig) and config.loss_agg_constant is None:
        config = replace(config, loss_agg_constant=longest)
    return config


def prepare(config: RunConfig, platform: Platform) -> Prepared:
    """Reads configuration, model, tokenizer, prompts and the checkpoint to resume from.

    Raises ConfigError and kin with everything that keeps the run from starting.
    """
    refuse_if_any(run_violations(config))
    directory = Path(config.model_directory)
    prepare_model(config.model, directory, pictures=config.sees_pictures)
    refuse_if_any(list(sight_violations(config)))
    policy = admit(directory, config.rollout, platform, pictures=config.sees_pictures)
    models = {
        role.name: policy
        if role.publishes
        else model_of(read_config(Path(config.weights_of(role))), pictures=config.sees_pictures)[1]
        for role in config.group_rows
    }
    violations = [*model_run_violations(config, models), *adapter_violations(config)]
    for role in config.group_rows:
        violations += architecture_violations(config.checkpoints_of(role), pictures=config.sees_pictures)
    violations += placement_violations(config.trainer, config.rollout.layout, platform)
    violations += replay_model_violations(config, policy, None if config.trainer.replay else why_unrecorded(platform))
    encoder, judge_tokenizer = _scorers(config, platform, violations)
    refuse_if_any(violations)
    _demand_weights(config)
    tokenizer = load_tokenizer(config.model.tokenizer_path or directory)
    refuse_if_any([*vocabulary_violations(config, tokenizer), *answer_violations(config.reward, tokenizer)])
    agents = AgentRunner(
        config.rollout.agent,
        config.reward.code,
        tokenizer,
        config.data.chat_template_kwargs,
        config.data.max_prompt_length,
    )
    train, validation = _prompts(config, tokenizer, agents, picture_reader(config.data, policy))
    if train is not None and config.teachers is not None and config.teachers.by_source:
        refuse_if_any(list(teacher_violations(config.teachers, train.data_sources)))
    refuse_if_any(list(_narrow_microbatches(config, train)))
    data_sources = _data_sources(config, rows_of(train, validation), encoder)
    data = config.data
    sampler = PromptSampler(1 if train is None else len(train), data.seed, data.shuffle)
    num_steps = 0 if train is None else _num_steps(config, sampler)
    refuse_if_any(list(schedule_violations(config, num_steps)))
    identity, checkpoint, progress = to_resume(config, sampler, () if train is None else train.media)
    kl = KlController(config.algorithm.kl_ctrl)
    if checkpoint is not None:
        kl.load_state_dict(progress.kl)
    return Prepared(
        tokenizer=tokenizer,
        train=train,
        validation=validation,
        sampler=sampler,
        num_steps=num_steps,
        models=models,
        progress=progress,
        checkpoint=checkpoint,
        identity=identity,
        kl=kl,
        encoder=encoder,
        judge_tokenizer=judge_tokenizer,
        agents=agents,
        data_sources=data_sources,
        draw_settings=(settings := draw_settings(config, identity)),
        kept=_kept(config, checkpoint, progress.step, settings, train),
        settings_sum=settings_sum(identity),
        shelf=_shelf(train, validation),
    )


def _shelf(*sets: PromptSet | None) -> PictureShelf | None:
    pictured = [each for each in sets if each is not None and each.media]
    return PictureShelf(pictured) if pictured else None


def _demand_weights(config: RunConfig) -> None:
    """Raises CheckpointError unless every checkpoint of every role has its tensors."""
    for role in config.group_rows:
        for each in dict.fromkeys(config.checkpoints_of(role).values()):
            demand_weights(Path(each), role.head, pictures=config.sees_pictures)


def _scorers(
    config: RunConfig, platform: Platform, violations: list[Violation]
) -> tuple[Encoder | None, PreTrainedTokenizerBase | None]:
    """What encodes for the reward model, and for a judge of ours; their ``violations`` are added."""
    for key, each in config.scorers.items():
        violations += placement_violations(config.trainer, each.layout, platform, key)
    encoder = judge_tokenizer = None
    try:
        encoder = prepare_encoder(config.reward_model, platform) if config.reward_model.enable else None
    except ConfigError as error:
        violations += error.violations
    try:
        judge = config.reward.judge
        judge_tokenizer = None if judge.path is None else prepare_judge(judge, platform)
    except ConfigError as error:
        violations += error.violations
    return encoder, judge_tokenizer


def _narrow_microbatches(config: RunConfig, train: PromptSet | None) -> Iterator[Violation]:
    """Where a prompt and the longest response to it would not fit into a microbatch: the run would end with one."""
    if train is None:
        return
    longest = [[length + config.data.max_response_length] for length in train.lengths]
    for role in config.group_rows:
        for each in unit_violations(role.name, config.role_config(role), longest, "prompt"):
            yield replace(each, problem=f"{each.problem} with the longest response to it")
        yield from patch_violations(role.name, config.role_config(role), train.media, pairs=trains_pairs(config))


def _num_steps(config: RunConfig, sampler: PromptSampler) -> int:
    """Of the whole run.  ConfigError: there are fewer prompts than a batch takes."""
    data = config.data
    trainer = config.trainer
    per_epoch = sampler.batches_per_epoch(data.train_batch_size)
    if data.gen_batch_size is not None:
        sampler.batches_per_epoch(data.gen_batch_size, "data.gen_batch_size")
    return trainer.total_training_steps or per_epoch * trainer.total_epochs


def _kept(
    config: RunConfig, checkpoint: Path | None, step: int, settings: dict[str, Any], train: PromptSet | None
) -> KeptDraws | None:
    """``Prepared.kept``; a replay has a record in its place."""
    if checkpoint is None or train is None or config.trainer.replay is not None:
        return None
    return kept_rollouts(checkpoint, step, config, settings, train)


def _prompts(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, agents: AgentRunner, pictures: PictureReader | None
) -> tuple[PromptSet | None, PromptSet | None]:
    """The prompts for training and those for validation; None if there are none.

    Warns of what the chat template does with more than one turn, if a row has an agent.
    """
    data = config.data
    train: PromptSet | None = None
    validation: PromptSet | None = None
    load = partial(PromptSet.load, config=data, tokenizer=tokenizer, agents=agents, pictures=pictures)
    if not config.trainer.val_only:
        answers = None
        if needs_answers(config) and data.answer_key is not None:
            ends = {*end_tokens(config.model_directory), *config.rollout.stop_token_ids}
            turns = Turns.of(tokenizer, data.chat_template_kwargs, ends=ends)
            answers = OwnAnswers(turns, data.answer_key, data.prompt_key)
        train = load(data.train_files, max_samples=data.train_max_samples, title="data.train_files", answers=answers)
    if data.val_files:
        validation = load(data.val_files, max_samples=data.val_max_samples, title="data.val_files")
    has_agents, notes = agents.check_rows(rows_of(train, validation))
    if has_agents and config.actor.router_replay is RouterReplay.r3:
        problem = "an agent's episode is drawn turn by turn, and the experts of its turns are not put together"
        refuse_if_any([Violation("actor.router_replay", "r3", problem, "Write r2 or off with rows of agents")])
    compares = any(isinstance(stage, OnController) for stage in estimator(config.algorithm.adv_estimator).stages)
    if has_agents and (trains_pairs(config) or compares) and train is not None:
        programs = [row.id for row in rows_of(train) if agents.loop_of_row(row) == PROGRAM]
        problem = f"compares responses, and a program's run may have several conversations: {named(programs)}"
        remedy = "Choose an algorithm that does not, or leave these rows out"
        name = config.algorithm.adv_estimator
        refuse_if_any([Violation("algorithm.adv_estimator", name, problem, remedy)] if programs else [])
    if has_agents and pictures is not None:
        demand_shown(rows_of(train, validation), agents, pictures.key)
    for line in notes:
        warn(line)
    return train, validation


def rows_of(*sets: PromptSet | None) -> Iterator[PromptRow]:
    """All rows of ``sets``, one set after the other."""
    for each in sets:
        if each is not None:
            yield from map(each.__getitem__, range(len(each)))


def demand_shown(rows: Iterable[PromptRow], agents: AgentRunner, key: str) -> None:
    """ConfigError: rows of a user's program have pictures, which ``key`` is the column of."""
    unseen = [row.id for row in rows if row.media and agents.loop_of_row(row) == PROGRAM]
    problem = f"and a user's program writes its prompts itself, without the pictures of its rows: {named(unseen)}"
    remedy = "Leave these rows out, or ask for another agent"
    refuse_if_any([Violation("data.image_key", key, problem, remedy)] if unseen else [])


def _data_sources(config: RunConfig, rows: Iterable[PromptRow], encoder: Encoder | None) -> frozenset[str]:
    """The data sources that graders grade.  ConfigError: a row has no grader, or reward model or judge no row."""
    by_graders: set[str] = set()
    ids: dict[Style, list[str]] = {Style.model: [], Style.judge: []}
    first: PromptRow | None = None  # of those that the reward model reads
    for row in rows:
        if row.style is Style.rule:
            by_graders.add(row.data_source)
            continue
        if row.style is Style.model:
            first = first or row
        ids[row.style].append(row.id)
    violations = style_violations(config.reward_model, config.reward.judge, config.custom_reward_function, ids)
    if encoder is not None and first is not None and (problem := template_problem(encoder, first.messages)):
        remedy = "Name a tokenizer whose template can write it, or mend the row"
        where = config.reward_model.model.tokenizer_path
        violations.append(Violation("reward_model.model.tokenizer_path", where, f"{first.id}: {problem}", remedy))
    refuse_if_any(violations)
    return frozenset(by_graders)
