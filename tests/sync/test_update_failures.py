"""Whoever fails or is killed in an update: all hear of it in time, with the name, and the next one works."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcore_rl.config.rollout import parse_rollout_layout
from mcore_rl.errors import DeadEngineError, RolloutError, SyncError
from mcore_rl.rollout.engine_process import EngineProcess
from mcore_rl.sync.update import WeightSync
from tests.support import sync_cases
from tests.support.live_trainers import LiveTrainers
from tests.support.sync_cases import MODELS, distance_from_transformers, greedy

LIMIT_S = 30.0
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def trainers() -> Iterator[LiveTrainers]:
    with LiveTrainers() as live:
        yield live


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return sync_cases.write("llama", tmp_path_factory.mktemp("llama"))


def test_a_killed_worker_and_a_failing_trainer(trainers: LiveTrainers, weights: tuple[Path, Path]) -> None:
    a, b = weights
    with sync_cases.engine(a, "tp=2") as engine:
        asyncio.run(_a_trainer_fails(trainers, engine, a, b))
        asyncio.run(_a_worker_is_killed(trainers, engine, b))
    with sync_cases.engine(a, "tp=2") as engine:  # a restart receives the current weights
        asyncio.run(_restarted(trainers, engine, b))


async def _a_trainer_fails(trainers: LiveTrainers, engine: EngineProcess, a: Path, b: Path) -> None:
    await trainers.build("llama", MODELS["llama"], "tp=2", b, "tp=2")
    sync = WeightSync([engine], parse_rollout_layout("tp=2"), trainers)
    await trainers.order("stumble", 1, 0.0, "a row of the plan is broken")
    begun = time.monotonic()
    with pytest.raises(SyncError, match=r"training rank 1 \(process \d+ on .*\) failed while publishing version 1: "):
        await sync.update(1)
    assert time.monotonic() - begun < LIMIT_S
    assert all("ValueError: a row of the plan is broken" in str(error) for error in trainers.errors)
    with pytest.raises(RolloutError, match=r"an update of its weights failed.*training rank 1"):
        await greedy(engine)
    await sync.update(2)
    assert distance_from_transformers(await greedy(engine), b) < TOLERANCE


async def _a_worker_is_killed(trainers: LiveTrainers, engine: EngineProcess, b: Path) -> None:
    await trainers.build("llama", MODELS["llama"], "pp=2", b, "tp=2")
    sync = WeightSync([engine], parse_rollout_layout("tp=2"), trainers)
    await sync.update(3)
    await trainers.order("stumble", 1, 4.0, None)  # of the last stage, from which both rollout ranks wait
    update = asyncio.create_task(sync.update(4))
    await asyncio.sleep(2.0)
    victim = trainers.process_of(1)
    begun = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(DeadEngineError, match="running sync_receive"):
        await update
    assert time.monotonic() - begun < LIMIT_S
    named = [f"rollout rank 1 (process {victim} on " in str(error) for error in trainers.errors]
    assert named == [True, True], trainers.errors


async def _restarted(trainers: LiveTrainers, engine: EngineProcess, b: Path) -> None:
    await trainers.build("llama", MODELS["llama"], "tp=2", b, "tp=2")
    sync = WeightSync([engine], parse_rollout_layout("tp=2"), trainers)
    await sync.update(5)
    assert distance_from_transformers(await greedy(engine), b) < TOLERANCE
