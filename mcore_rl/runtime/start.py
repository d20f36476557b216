"""Starts the processes of a run in the bundles of ``placement``, with the environment that each needs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray

from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.config.rollout import RolloutConfig
from mcore_rl.config.trainer import TrainerConfig, WatchdogConfig
from mcore_rl.parallel.cpu import UNCOMPILED
from mcore_rl.parallel.device import Platform, num_cores
from mcore_rl.parallel.device_details import work_queues
from mcore_rl.parallel.layout import Layout
from mcore_rl.parallel.secret_store import StoreAccess
from mcore_rl.rollout.pool import EnginePool
from mcore_rl.rollout.served import Served
from mcore_rl.rollout.vllm.engine.environment import core_shares, usable_cores
from mcore_rl.runtime.engine_client import EngineClient, PartSpec
from mcore_rl.runtime.placement import EngineBundles, Places
from mcore_rl.runtime.rollout_worker import RolloutWorker
from mcore_rl.runtime.train_group import TrainGroup
from mcore_rl.runtime.train_worker import TrainWorker
from mcore_rl.runtime.watchdog import Watchdog
from mcore_rl.runtime.worker_values import RoleSpec


async def start_trainers(
    spec: RoleSpec, places: Places, platform: Platform, logs: Path, trainer: TrainerConfig, store: StoreAccess
) -> TrainGroup:
    """Starts the training processes of one role and joins them in their process groups; call ``build`` next.

    store: of the run, where they meet.
    """
    world_size = len(places.train)
    environment = training_environment(platform, spec.parallel, world_size)
    files = [logs / f"{spec.role}-rank-{rank}.log" for rank in range(world_size)]
    workers = [
        ray.remote(TrainWorker)
        .options(
            **place.options({"num_cpus": 0, "num_gpus": places.share}),
            runtime_env={"env_vars": environment},
            max_concurrency=1,
        )
        .remote(rank, world_size, files[rank])
        for rank, place in enumerate(places.train)
    ]
    layout = Layout.of(spec.parallel, world_size)
    watchdog = Watchdog(trainer.watchdog, trainer.timeout_s)
    group = TrainGroup(spec.role, workers, layout, ["its node"] * world_size, files, watchdog)
    try:
        await group.join(store, spec, trainer.timeout_s)
    except BaseException:
        group.close()
        raise
    return group


def training_environment(platform: Platform, parallel: ParallelConfig, world_size: int) -> dict[str, str]:
    """The environment variables with which the training processes of a role start.

    On CPU, each computes with its share of this machine's cores, at least one.
    """
    threads = 1 if platform.is_accelerator else max(1, num_cores() // world_size)
    environment = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    if not platform.is_accelerator:
        environment |= UNCOMPILED
    return environment | work_queues(platform, parallel)


@dataclass(frozen=True)
class Joining:
    """An engine beside others.  number: in its name.  slot: its place among them.  beside: how many those are."""

    number: int = 0
    slot: int = 0
    beside: int = 0


async def start_engines(
    served: Served,
    bundles: Sequence[EngineBundles],
    platform: Platform,
    logs: Path,
    stack: AsyncExitStack,
    trainers: TrainGroup | None = None,
    *,
    watchdog: Watchdog | None = None,
    joins: Joining | None = None,
) -> list[EngineClient]:
    """Starts an engine of ``served`` in each of ``bundles`` and waits until all are ready; closing ``stack`` ends them.

    bundles: of each engine, one per node that it is on.
    trainers: the workers whose devices the engines share; None: each engine has the devices of its bundles.
    watchdog: says when an engine hangs; it learns from the calls of all of them.  None: by the default limits.
    joins: of one that joins others.
    On CPU the engines share this machine's cores, each, and each of its parts on other nodes, with cores of its own if
    there are enough.
    """
    joins = joins or Joining()
    ids = None if trainers is None or not platform.is_accelerator else await trainers.device_ids()
    nodes = len(bundles[0])  # of every engine
    cores = None if platform.is_accelerator else core_shares(usable_cores(), nodes * (joins.beside + len(bundles)))
    devices = served.config.layout.engine_size // nodes
    own = platform.is_accelerator and trainers is None

    def part(engine: int, node: int) -> PartSpec:
        """The part of an engine on one of its nodes."""
        number = engine * nodes + node
        options = bundles[engine][node].options({"num_cpus": 0, "num_gpus": devices if own else 0})
        title = f"{served.name} {joins.number + engine}" + (f" (node {node})" if node else "")
        file = f"{served.name.replace(' ', '-')}-{joins.number + engine}" + (f"-node-{node}" if node else "")
        return PartSpec(
            new_worker=partial(_new_worker, title, options),
            log=logs / f"{file}.log",
            cores=None if cores is None else cores[(joins.slot * nodes + number) % len(cores)],
            device_ids=None if ids is None else [each for rank in ids[number * devices :][:devices] for each in rank],
        )

    watchdog = watchdog or Watchdog(WatchdogConfig())
    engines = [
        EngineClient(f"{served.name} {joins.number + engine}", [part(engine, node) for node in range(nodes)], watchdog)
        for engine in range(len(bundles))
    ]
    try:
        results = await asyncio.gather(*(engine.start(served) for engine in engines), return_exceptions=True)
        for error in (result for result in results if isinstance(result, BaseException)):
            raise error
    except BaseException:
        for engine in engines:
            engine.kill()
        raise
    for engine in engines:
        stack.push_async_callback(engine.shutdown)
    return engines


def _new_worker(name: str, options: Mapping[str, Any]) -> Any:
    return ray.remote(RolloutWorker).options(**options).remote(name)


def pool_of(engines: Sequence[EngineClient], rollout: RolloutConfig, *, goes_on: bool = False) -> EnginePool:
    """A pool of the engines, which share one queue of requests.  goes_on: see ``EnginePool``."""
    return EnginePool(engines, rollout.max_num_seqs, goes_on=goes_on)
