"""Starts a replay (``trainer.replay``): the trainer alone, which is given the rollouts that another run recorded."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from mcore_rl.config.run import RunConfig
from mcore_rl.config.schedule import scheduled
from mcore_rl.controller.lifecycle.device_sharing import TrainerAlone
from mcore_rl.controller.lifecycle.preparation import Prepared, complete, demand_steps, prepare, weights_of_roles
from mcore_rl.controller.lifecycle.replay_check import last_recorded
from mcore_rl.controller.lifecycle.start_plan import doubts_of, forecast, tell_plan
from mcore_rl.controller.lifecycle.start_roles import start_roles
from mcore_rl.controller.programs.start import one_thread
from mcore_rl.controller.run import Run
from mcore_rl.controller.training_run import begin_records, open_directory
from mcore_rl.parallel.device import detect
from mcore_rl.parallel.secret_store import StoreServer
from mcore_rl.planning.plan import Plan
from mcore_rl.runtime.cluster import meeting_host
from mcore_rl.runtime.placement import place_trainers
from mcore_rl.runtime.seen_paths import demand_seen


@asynccontextmanager
async def open_replay(config: RunConfig) -> AsyncIterator[Run]:
    """While open: the training processes of the run are up, with their first weights.  Afterwards none is left."""
    platform = detect(config.trainer.device)
    config, prepared, planned = _prepared(config)
    tell_plan(planned, doubts_of(config, platform))
    async with AsyncExitStack() as stack:
        stack.enter_context(one_thread())
        tracker = open_directory(config, prepared, platform, stack, stack)
        tracker.now("starting the trainer")
        places = await place_trainers(config.trainer, platform)
        stack.callback(places.close)
        await demand_seen(weights_of_roles(config), places.nodes)
        store = stack.enter_context(StoreServer(meeting_host(config.ray_init))).access
        groups = await start_roles(config, prepared.checkpoint, places, platform, store, stack)
        stack.callback(prepared.agents.close)
        begin_records(config, prepared, planned, tracker)
        run = Run(config, platform, tracker, prepared, groups, None, TrainerAlone(), None)
        stack.push_async_callback(run.saver.close)
        yield run


def check_replay(config: RunConfig) -> tuple[Prepared, Plan]:
    """All that ``open_replay`` does before Ray is started.  Raises as it does."""
    _, prepared, planned = _prepared(config)
    return prepared, planned


def _prepared(config: RunConfig) -> tuple[RunConfig, Prepared, Plan]:
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
