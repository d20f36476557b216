"""Starts a run (Ray, the trainer, the engines, the channel between them), and takes all of it down again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from mcore_rl.config.asynchrony import trains_stale
from mcore_rl.config.roles import RouterReplay
from mcore_rl.config.rollout import UPDATE_BUCKET_BYTES
from mcore_rl.config.run import RunConfig
from mcore_rl.config.schedule import scheduled
from mcore_rl.config.trainer import Placement
from mcore_rl.controller.lifecycle.device_sharing import DeviceSharing
from mcore_rl.controller.lifecycle.fault_tolerance import EngineRestarter
from mcore_rl.controller.lifecycle.graded_rows import check_graded_rows
from mcore_rl.controller.lifecycle.messages import note, warn
from mcore_rl.controller.lifecycle.model_checks import engine_adapters
from mcore_rl.controller.lifecycle.preparation import Prepared, complete, models_of, prepare
from mcore_rl.controller.lifecycle.resending_pool import ResendingPool
from mcore_rl.controller.lifecycle.reward_engines import start_reward_model
from mcore_rl.controller.lifecycle.start_plan import forecast
from mcore_rl.controller.lifecycle.start_roles import start_roles
from mcore_rl.controller.lifecycle.transport import weight_transport
from mcore_rl.controller.lifecycle.weight_sync import WeightSync
from mcore_rl.controller.run import Run
from mcore_rl.controller.step.rollout_collection import RolloutCollector
from mcore_rl.controller.step.rollout_source import Ahead
from mcore_rl.controller.training_run import begin_records, open_directory
from mcore_rl.errors import DeadEngineError
from mcore_rl.parallel.device import Platform, detect
from mcore_rl.parallel.secret_store import StoreAccess, StoreServer
from mcore_rl.planning.peaks import leaves_behind
from mcore_rl.planning.plan import Plan
from mcore_rl.rewards.scorer import Scorer
from mcore_rl.runtime.cluster import meeting_host
from mcore_rl.runtime.engine_client import EngineClient
from mcore_rl.runtime.placement import Places, place
from mcore_rl.runtime.seen_paths import demand_seen
from mcore_rl.runtime.start import pool_of, start_engines
from mcore_rl.runtime.train_group import TrainGroup
from mcore_rl.runtime.watchdog import Watchdog
from mcore_rl.sync.update import WeightUpdater
from mcore_rl.training.offload import OffloadPart

A = TypeVar("A")
B = TypeVar("B")


@asynccontextmanager
async def open_run(config: RunConfig) -> AsyncIterator[Run]:
    """While open: all processes of the run are up, with their first weights.  Afterwards none is left."""
    platform = detect(config.trainer.device)
    config = complete(config, platform)
    prepared, planned = _prepared(config, platform)
    config = scheduled(config, prepared.num_steps)
    trainer, logs = config.trainer, Path(config.trainer.default_local_dir) / "logs"
    async with AsyncExitStack() as stack:
        stack.enter_context(_one_thread())
        scorer = stack.enter_context(_scorer(config, prepared))
        tracker = open_directory(config, prepared, platform, stack)
        judge = config.reward_model
        places = await place(trainer, config.rollout.layout, platform, judge.layout if judge.enable else None)
        stack.callback(places.close)
        await demand_seen(models_of(config), places.nodes)

        store = stack.enter_context(StoreServer(meeting_host(config.ray_init))).access
        leaves = leaves_behind(planned.peaks)
        starting_roles = start_roles(config, prepared.checkpoint, places, platform, store, stack, leaves_behind=leaves)
        directory = Path(config.model_directory)
        watchdog = Watchdog(trainer.watchdog, trainer.timeout_s)
        starting_engines = partial(
            start_engines, directory, config.served_rollout, places.rollout, platform, logs, stack, awaits_weights=True,
            adapters=engine_adapters(config), watchdog=watchdog,
        )  # fmt: skip
        colocated, policy = trainer.placement is Placement.colocated, config.policy.name
        if colocated and platform.is_accelerator:  # engines measure what the trainer left free of a device
            tracker.now("starting the trainer")
            groups = await starting_roles
            tracker.now("starting the rollout engines")
            engines = await starting_engines(groups[policy])
        else:
            tracker.now("starting the trainer and the rollout engines")
            groups, engines = await _together(starting_roles, starting_engines())
        pool, reward_model = pool_of(engines, config.rollout, goes_on=not colocated), None
        if prepared.encoder is not None:
            tracker.now("starting the reward model")
            bundles, shared = places.reward_model, groups[policy] if colocated else None
            reward_model = await start_reward_model(config, prepared.encoder, bundles, platform, logs, shared, stack)

        updater = await _weight_updater(config, platform, places, groups[policy], engines, store)
        restarter = EngineRestarter(engines, pool, trainer.max_restarts, warn=warn)
        weights = WeightSync(updater, restarter, pool, trainer.guards.check_weights_freq)
        devices = DeviceSharing(
            trainer.placement, groups[policy], pool, weights, restarter, reward_model,
            keep_base=engine_adapters(config) is not None,
        )  # fmt: skip
        samples = ResendingPool(pool, restarter, devices, weights)
        recorded = prepared.models[policy] if config.actor.router_replay is RouterReplay.r3 else None
        stack.callback(prepared.agents.close)
        collector = RolloutCollector(samples, scorer, config, reward_model, recorded, prepared.agents)
        ahead = None
        if trains_stale(config):
            recover = partial(_recover, restarter, weights)
            ahead = Ahead(collector=collector.over(pool), restart_dead=restarter.restart_dead, recover=recover)
        begin_records(config, prepared, planned, tracker)
        run = Run(config, platform, tracker, prepared, groups, collector, devices, weights, ahead)
        stack.push_async_callback(run.saver.close)
        yield run


async def _recover(restarter: EngineRestarter, weights: WeightSync, death: DeadEngineError) -> None:
    """Restarts dead engines while the trainer waits, and gives all engines the weights that they had."""
    version = weights.version
    assert version is not None, "engines draw with weights that they were given"
    await restarter.restart_dead(death)
    await weights.update(version)


def check_run(config: RunConfig) -> tuple[Prepared, Plan]:
    """All that ``open_run`` does before Ray is started: what it reads, and what it plans.  Raises as it does."""
    platform = detect(config.trainer.device)
    config = complete(config, platform)
    prepared, planned = _prepared(config, platform)
    with _scorer(config, prepared):
        return prepared, planned


@contextmanager
def _scorer(config: RunConfig, prepared: Prepared) -> Iterator[Scorer]:
    """While open: what grades, once it has seen that it can grade every row of ``prepared``."""
    with Scorer(config.reward, config.custom_reward_function) as scorer:
        scorer.check_sources(prepared.data_sources)
        files = [each for each in (prepared.train, prepared.validation) if each is not None]
        rows = (each[index] for each in files for index in range(len(each)))
        for line in check_graded_rows(scorer, config.custom_reward_function, rows):
            note(line)
        yield scorer


async def _weight_updater(
    config: RunConfig, platform: Platform, places: Places, actor: TrainGroup, engines: Sequence[EngineClient],
    store: StoreAccess,
) -> WeightUpdater:  # fmt: skip
    """The updater of ``engines`` with the weights of ``actor``; they meet at ``store``."""
    transport = weight_transport(config, platform, places, store)
    await actor.onload([OffloadPart.weights])  # which are away where engines stand on the same devices
    rollout = config.rollout
    await actor.connect(transport, rollout.layout, rollout.dtype, UPDATE_BUCKET_BYTES, rollout.lora)
    return WeightUpdater(engines, rollout.layout, actor)


def _prepared(config: RunConfig, platform: Platform) -> tuple[Prepared, Plan]:
    """Prepares and plans the run; raises before anything is started if either finds a violation."""
    prepared = prepare(config, platform)
    return prepared, forecast(config, platform, prepared.models)


@contextmanager
def _one_thread() -> Iterator[None]:
    """While active: torch uses one thread here, since the tensors are small and other processes need the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


async def _together(first: Coroutine[Any, Any, A], second: Coroutine[Any, Any, B]) -> tuple[A, B]:
    """Awaits both at the same time; if one fails, raises its error once the other has ended."""
    both = asyncio.ensure_future(first), asyncio.ensure_future(second)
    try:
        made, also_made = await asyncio.gather(*both)
        return made, also_made
    finally:
        for each in both:
            each.cancel()
        await asyncio.wait(both)
