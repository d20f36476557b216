"""An engine that awaits its weights reads none: its first update fills all that it executes with.

The file of its weights has one wrong name, so that an engine that read it would not start.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from mcore_rl.config.rollout import parse_rollout_layout
from mcore_rl.ground.errors import RolloutError
from mcore_rl.rollout.vllm.engine.process import EngineProcess
from mcore_rl.sync.update import WeightUpdater
from tests.support import sync_cases
from tests.support.live_trainers import LiveTrainers
from tests.support.sync_cases import MODELS, distance_from_transformers, greedy

TOLERANCE = 1e-5  # float32, another order of sums


def unreadable(directory: Path, target: Path) -> Path:
    """A copy of ``directory`` whose weights have a name that vLLM's model has not."""
    shutil.copytree(directory, target)
    path, name = target / "model.safetensors", b'"model.norm.weight"'
    stored = path.read_bytes()
    assert stored.count(name) == 1
    path.write_bytes(stored.replace(name, b'"model.mron.weight"'))
    return target


# Tied and biased, experts that are packed, and a soft cap with an embedding that is multiplied with.
@pytest.mark.parametrize(
    "name", ["qwen2", *(pytest.param(name, marks=pytest.mark.tier("full")) for name in ("mixtral", "gemma2"))]
)
def test_the_first_update_fills_an_engine_that_read_nothing(name: str, trainers: LiveTrainers, tmp_path: Path) -> None:
    a, b = sync_cases.write(name, tmp_path)
    with sync_cases.engine(unreadable(a, tmp_path / "unreadable"), awaits_weights=True) as engine:
        asyncio.run(_fills(trainers, engine, name, a, b))


async def _fills(trainers: LiveTrainers, engine: EngineProcess, name: str, a: Path, b: Path) -> None:
    with pytest.raises(RolloutError, match="does not generate: it was started without weights"):
        await greedy(engine)
    with pytest.raises(RolloutError, match="started without weights"):
        await engine.resume()
    await trainers.build(name, MODELS[name], "pp=2", a, "tp=1")
    sync = WeightUpdater([engine], parse_rollout_layout("tp=1"), trainers)
    for version, weights in enumerate((b, a), start=1):
        await trainers.order("load", weights)
        await sync.update(version)
        await sync.check()
        assert distance_from_transformers(await greedy(engine), weights) < TOLERANCE, version
