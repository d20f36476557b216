"""Whoever fails or is killed in an update: all hear of it in time, with the name, and the next one works."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from mcore_rl.config.rollout import parse_rollout_layout
from mcore_rl.ground.errors import DeadEngineError, RolloutError, SyncError
from mcore_rl.rollout.vllm.engine.process import EngineProcess
from mcore_rl.sync.update import WeightUpdater
from tests.support.live_trainers import LiveTrainers
from tests.support.sync_cases import MODELS, distance_from_transformers, greedy
from tests.sync.conftest import Running

LIMIT_S = 30.0
TOLERANCE = 1e-5


@pytest.mark.parametrize("running", [("qwen2", "tp=2", "a")], indirect=True, ids=["qwen2"])
def test_a_failing_trainer_and_a_killed_worker(trainers: LiveTrainers, running: Running) -> None:
    asyncio.run(_another_model(trainers, running.engine, running.b))
    asyncio.run(_a_trainer_fails(trainers, running.engine, running.b))
    asyncio.run(_a_worker_is_killed(trainers, running.engine, running.b))


@pytest.mark.tier("full")
@pytest.mark.parametrize("running", [("qwen2", "tp=2", "b")], indirect=True, ids=["qwen2"])
def test_a_restart_receives_the_current_weights(trainers: LiveTrainers, running: Running) -> None:
    asyncio.run(_restarted(trainers, running))


async def _another_model(trainers: LiveTrainers, engine: EngineProcess, b: Path) -> None:
    """The weights are the same, and the trainers compute something else with them."""
    other = replace(MODELS["qwen2"], norm_epsilon=1e-3, rotary_base=MODELS["qwen2"].rotary_base * 2)
    await trainers.build("qwen2", other, "pp=2", b, "tp=2")
    with pytest.raises(SyncError) as caught:
        await WeightUpdater([engine], parse_rollout_layout("tp=2"), trainers).update(1)
    epsilon, rope = str(caught.value).splitlines()[1:-1]
    assert epsilon.endswith("and the final norm: the trainer 0.001, rollout rank 0 1e-05"), epsilon
    assert "rotary_frequencies of layers 0, 1, 2, 3: the trainer 16 pairs of base 20000, " in rope
    assert rope.endswith("rollout rank 0 16 pairs of base 10000")
    with pytest.raises(RolloutError, match=r"(?s)an update of its weights failed.*norm_epsilon"):
        await greedy(engine)


async def _a_trainer_fails(trainers: LiveTrainers, engine: EngineProcess, b: Path) -> None:
    await trainers.build("qwen2", MODELS["qwen2"], "tp=2", b, "tp=2")
    sync = WeightUpdater([engine], parse_rollout_layout("tp=2"), trainers)
    await trainers.order("stumble", 1, "a row of the plan is broken")
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
    await trainers.build("qwen2", MODELS["qwen2"], "pp=2", b, "tp=2")
    sync = WeightUpdater([engine], parse_rollout_layout("tp=2"), trainers)
    await sync.update(3)
    await trainers.order("stumble", 1, None)  # of the last stage, from which both rollout ranks wait
    update = asyncio.create_task(sync.update(4))
    await trainers.stumbling()
    victim = trainers.process_of(1)
    begun = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    trainers.go_on()
    with pytest.raises(DeadEngineError, match="running sync_receive"):
        await update
    assert time.monotonic() - begun < LIMIT_S
    named = [f"rollout rank 1 (process {victim} on " in str(error) for error in trainers.errors]
    assert named == [True, True], trainers.errors


async def _restarted(trainers: LiveTrainers, running: Running) -> None:
    """Fresh, it held b; so what comes is a."""
    await trainers.build("qwen2", MODELS["qwen2"], "tp=2", running.a, "tp=2")
    sync = WeightUpdater([running.engine], parse_rollout_layout("tp=2"), trainers)
    assert distance_from_transformers(running.fresh, running.b) < TOLERANCE
    await sync.update(5)
    assert distance_from_transformers(await greedy(running.engine), running.a) < TOLERANCE
