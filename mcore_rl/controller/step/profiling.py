"""Traces of chosen steps, one file for each training process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from mcore_rl.config.trainer import TrainerConfig
from mcore_rl.runtime.train_group import TrainGroup


@asynccontextmanager
async def profiled(groups: Sequence[TrainGroup], step: int, trainer: TrainerConfig) -> AsyncIterator[None]:
    """Within: where ``trainer.profile_steps`` names the step, every process of ``groups`` is traced.

    After: ``profiles/step_N/ROLE-rank-R.json`` in the run directory.  A step that fails leaves none.
    """
    if step not in trainer.profile_steps:
        yield
        return
    for group in groups:
        await group.start_profile()
    yield
    for group in groups:
        await group.stop_profile(Path(trainer.default_local_dir) / "profiles" / f"step_{step}")
