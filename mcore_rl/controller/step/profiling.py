"""Traces chosen steps, one file per training process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from mcore_rl.config.trainer import TrainerConfig
from mcore_rl.runtime.train_group import TrainGroup


@asynccontextmanager
async def profiled(groups: Sequence[TrainGroup], step: int, trainer: TrainerConfig) -> AsyncIterator[None]:
    """While active: traces every process of ``groups`` if ``trainer.profile_steps`` names the step.

    On exit, writes ``profiles/step_N/ROLE-rank-R.json`` in the run directory; a step that fails writes none.
    """
    if step not in trainer.profile_steps:
        yield
        return
    for group in groups:
        await group.start_profile()
    yield
    for group in groups:
        await group.stop_profile(Path(trainer.default_local_dir) / "profiles" / f"step_{step}")
