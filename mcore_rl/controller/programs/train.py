"""``mcore-rl train``: reinforcement learning, from its start to its report."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from mcore_rl.config.run import RunConfig
from mcore_rl.controller.lifecycle.engine_set import LivingEngines
from mcore_rl.controller.loop import train
from mcore_rl.controller.programs.program import run_program, show_check
from mcore_rl.controller.programs.start import check_replay, check_run, open_replay, open_run
from mcore_rl.controller.training_run import Callback
from mcore_rl.parallel.device import detect


async def run_training(config: RunConfig, callbacks: Sequence[Callback] = ()) -> int:
    """Train, validate, save, export to ``RUN/hf/final``; returns the exit code of ``run_program``."""
    if config.trainer.replay is not None:
        return await run_program(config, open_replay, train, callbacks)
    living = LivingEngines()
    return await run_program(config, partial(open_run, living=living), train, callbacks, living)


def check_training(config: RunConfig) -> int:
    """Read, check and plan all that a run needs, show the plan, and start nothing; returns the exit code 0."""
    prepared, planned = check_run(config) if config.trainer.replay is None else check_replay(config)
    show_check(config, prepared, planned, detect(config.trainer.device))
    return 0
