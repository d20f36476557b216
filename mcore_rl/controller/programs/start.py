"""Starts a run (Ray, the trainer, the engines, the channel between them), and takes all of it down again.

A replay (``trainer.replay``) is the trainer alone, which is given the rollouts that another run recorded.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from mcore_rl.config.asynchrony import trains_stale
from mcore_rl.config.lora import PublishedLora
from mcore_rl.config.roles import RouterReplay
from mcore_rl.config.rollout import UPDATE_BUCKET_BYTES
from mcore_rl.config.run import RunConfig
from mcore_rl.config.schedule import scheduled
from mcore_rl.config.trainer import Placement
from mcore_rl.controller.lifecycle import judging
from mcore_rl.controller.lifecycle.device_sharing import DeviceSharing, TrainerAlone
from mcore_rl.controller.lifecycle.elastic_engines import ElasticEngines
from mcore_rl.controller.lifecycle.engine_set import EngineSet, LivingEngines, Member, layout_of
from mcore_rl.controller.lifecycle.fault_tolerance import EngineRestarter
from mcore_rl.controller.lifecycle.judging import check_judge, opened_judge, opened_scorer
from mcore_rl.controller.lifecycle.kept_rollouts import with_progress
from mcore_rl.controller.lifecycle.messages import note, warn
from mcore_rl.controller.lifecycle.model_checks import engine_adapters
from mcore_rl.controller.lifecycle.preparation import Prepared, complete, demand_steps, prepare, rows_of
from mcore_rl.controller.lifecycle.replay_check import keep_identity, last_recorded
from mcore_rl.controller.lifecycle.resending_pool import ResendingPool
from mcore_rl.controller.lifecycle.start_plan import doubts_of, forecast, tell_plan
from mcore_rl.controller.lifecycle.start_processes import Start
from mcore_rl.controller.lifecycle.start_roles import start_trainers_alone
from mcore_rl.controller.lifecycle.weight_sync import WeightSync, weight_transport
from mcore_rl.controller.rollouts.rollout_source import Ahead
from mcore_rl.controller.run import Run
from mcore_rl.controller.step.rollout_collection import RolloutCollector
from mcore_rl.controller.training_run import begin_records, open_directory
from mcore_rl.ground.errors import DeadEngineError, DeadWorkerError
from mcore_rl.parallel.device import Platform, detect
from mcore_rl.parallel.secret_store import StoreAccess, StoreServer
from mcore_rl.planning.peaks import leaves_behind
from mcore_rl.planning.plan import Plan
from mcore_rl.rewards.scorer import Scorer
from mcore_rl.rollout.pool import EnginePool
from mcore_rl.runtime.cluster import meeting_host
from mcore_rl.runtime.placement import Places
from mcore_rl.runtime.start import pool_of
from mcore_rl.runtime.train_group import TrainGroup
from mcore_rl.sync.update import WeightUpdater
from mcore_rl.training.offload import OffloadPart


@asynccontextmanager
async def open_run(config: RunConfig, living: LivingEngines | None = None) -> AsyncIterator[Run]:
    """While open: all processes of the run are up, with their first weights.

    Afterwards none is left, except for engines that ``living`` keeps for another attempt.
    """
    platform, living = detect(config.trainer.device), living or LivingEngines()
    config = complete(config, platform)
    prepared, planned = _prepared(config, platform)
    tell_plan(planned, doubts_of(config, platform))
    if prepared.kept is not None and living.left is not None:
        prepared = replace(prepared, kept=with_progress(prepared.kept, living.left, prepared.progress.step))
    config = scheduled(config, prepared.num_steps)
    trainer = config.trainer
    policy = config.policy.name
    async with AsyncExitStack() as stack:
        stack.enter_context(one_thread())
        await stack.enter_async_context(living.attempt(trainer.placement))
        scorer = stack.enter_context(_scorer(config, prepared))
        await check_judge(config.reward, rows_of(prepared.train, prepared.validation))
        tracker = open_directory(config, prepared, platform, stack, None if living.kept else living.stack)
        store = stack.enter_context(StoreServer(meeting_host(config.ray_init))).access
        start = Start(config, prepared, platform, tracker, store, leaves_behind(planned.peaks))
        opened = partial(opened_judge, config.reward, start.directory / judging.FILE)
        judge = await stack.enter_async_context(opened())  # behind an address
        groups, kept = await start.processes(living, stack)
        judge = judge or await stack.enter_async_context(opened(kept.judge))
        engines = [member.client for member in kept.members]
        layout = config.rollout.layout
        pool = pool_of(engines, config.rollout, goes_on=trainer.placement is Placement.separate)
        connect = partial(_connect, config, platform, kept.places, groups[policy], store, living.num_attempts)
        tracker.now("connecting the trainer with the rollout engines")
        await connect(kept.members)
        updater = WeightUpdater(engines, layout_of(layout, len(engines)), groups[policy])
        restarter = EngineRestarter(engines, pool, trainer.max_restarts, warn=warn)
        engine_set = EngineSet(kept.members, pool, restarter, updater, layout, connect)
        weights = WeightSync(updater, restarter, pool, trainer.guards.check_weights_freq, engine_set)
        devices = DeviceSharing(
            trainer.placement,
            groups[policy],
            pool,
            weights,
            restarter,
            kept.scorers,
            keep_base=engine_adapters(config) is not None or (config.sees_pictures and not config.actor.trains_tower),
        )
        elastic = ElasticEngines(start.directory, start.newcomers(kept, living), engine_set, pool, weights, devices)
        samples = ResendingPool(pool, restarter, devices, weights)
        recorded = prepared.models[policy] if config.actor.router_replay is RouterReplay.r3 else None
        stack.callback(prepared.agents.close)
        collector = RolloutCollector(
            samples, scorer, config, kept.reward_model, recorded, prepared.agents, judge, pool.hits, prepared.shelf
        )
        ahead = None
        if trains_stale(config):
            ahead = Ahead(
                collector=collector.over(pool),
                is_dead=lambda: pool.death is not None,
                restart_dead=partial(_restart_dead, pool, restarter),
                recover=partial(_recover, pool, restarter, weights, devices),
                interrupt=pool.interrupt,
            )
        begin_records(config, prepared, planned, tracker)
        if trainer.record_rollouts:
            keep_identity(prepared.identity, start.directory)
        run = Run(config, platform, tracker, prepared, groups, collector, devices, elastic, ahead)
        run.watch(engine_set.lanes)
        if judge is not None:
            judge.at_limit = lambda: run.preemption.ask("reward.judge.max_cost")
        stack.push_async_callback(run.saver.close)
        stack.push_async_callback(run.recorder.close)
        stack.callback(run.thumbnails.close)
        try:
            yield run
        except DeadWorkerError:
            living.left = run.rollouts.kept
            raise


async def _restart_dead(pool: EnginePool, restarter: EngineRestarter, death: DeadEngineError) -> None:
    """Restarts dead engines, unless somebody has since ``death`` was met."""
    if pool.death is not None:
        await restarter.restart_dead(death)


async def _recover(
    pool: EnginePool, restarter: EngineRestarter, weights: WeightSync, devices: DeviceSharing, death: DeadEngineError
) -> None:
    """Restarts dead engines while the trainer waits, and gives all engines the weights that they had."""
    async with devices.engines_turn():
        if pool.death is None:  # who gave weights to an engine that joined has met the death, too
            return
        version = weights.version
        assert version is not None, "engines draw with weights that they were given"
        await restarter.restart_dead(death)
        await devices.send_again(version)


async def _connect(
    config: RunConfig,
    platform: Platform,
    places: Places,
    actor: TrainGroup,
    store: StoreAccess,
    attempt: int,
    members: Sequence[Member],
) -> None:
    """Lets the training ranks plan the copies to ``members``, whom they meet at ``store``."""
    layout = layout_of(config.rollout.layout, len(members))
    places = replace(places, rollout=tuple(member.bundles for member in members))
    config = replace(config, rollout=replace(config.rollout, dp=layout.dp))
    transport = weight_transport(config, platform, places, store, f"weights/{attempt}")
    await actor.onload([OffloadPart.weights])  # which are away where engines stand on the same devices
    form = PublishedLora.merged if engine_adapters(config) is None else PublishedLora.adapter
    rollout = config.rollout
    await actor.connect(transport, layout, rollout.dtype, UPDATE_BUCKET_BYTES, form, rollout.quantization)


def check_run(config: RunConfig) -> tuple[Prepared, Plan]:
    """All that ``open_run`` does before Ray is started: what it reads, and what it plans.  Raises as it does."""
    platform = detect(config.trainer.device)
    config = complete(config, platform)
    prepared, planned = _prepared(config, platform)
    with _scorer(config, prepared):
        asyncio.run(check_judge(config.reward, rows_of(prepared.train, prepared.validation)))
        return prepared, planned


def _scorer(config: RunConfig, prepared: Prepared) -> AbstractContextManager[Scorer]:
    rows = rows_of(prepared.train, prepared.validation)
    return opened_scorer(config.reward, config.custom_reward_function, prepared.data_sources, rows, note)


def _prepared(config: RunConfig, platform: Platform) -> tuple[Prepared, Plan]:
    """Prepares and plans the run; raises before anything is started if either finds a violation."""
    prepared = prepare(config, platform)
    demand_steps(config.trainer, prepared)
    return prepared, forecast(config, platform, prepared.models)


@contextmanager
def one_thread() -> Iterator[None]:
    """While active: torch uses one thread here, since the tensors are small and other processes need the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@asynccontextmanager
async def open_replay(config: RunConfig) -> AsyncIterator[Run]:
    """While open: the training processes of the run are up, with their first weights.  Afterwards none is left."""
    platform = detect(config.trainer.device)
    config, prepared, planned = _prepared_replay(config)
    tell_plan(planned, doubts_of(config, platform))
    async with AsyncExitStack() as stack:
        stack.enter_context(one_thread())
        tracker = open_directory(config, prepared, platform, stack, stack)
        tracker.now("starting the trainer")
        groups = await start_trainers_alone(config, prepared.checkpoint, platform, stack)
        stack.callback(prepared.agents.close)
        begin_records(config, prepared, planned, tracker)
        run = Run(config, platform, tracker, prepared, groups, None, TrainerAlone())
        stack.push_async_callback(run.saver.close)
        yield run


def check_replay(config: RunConfig) -> tuple[Prepared, Plan]:
    """All that ``open_replay`` does before Ray is started.  Raises as it does."""
    _, prepared, planned = _prepared_replay(config)
    return prepared, planned


def _prepared_replay(config: RunConfig) -> tuple[RunConfig, Prepared, Plan]:
    """(the completed configuration, what is prepared, the plan).  The run ends where the record does."""
    assert config.trainer.replay is not None
    platform = detect(config.trainer.device)
    config = complete(config, platform)
    prepared = prepare(config, platform)
    last = last_recorded(
        prepared.identity, Path(config.trainer.replay or ""), prepared.progress.step, prepared.num_steps
    )
    demand_steps(config.trainer, replace(prepared, num_steps=last))
    config = scheduled(config, prepared.num_steps)  # of rates: of the whole run
    prepared = replace(prepared, num_steps=last, validation=None, kept=None)
    return config, prepared, forecast(config, platform, prepared.models)
