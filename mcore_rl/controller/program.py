"""``mcore-rl train``: a run from its start to its report."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rich.console import Console

from mcore_rl.config.run import RunConfig
from mcore_rl.controller.checkpoints import complete_checkpoints
from mcore_rl.controller.loop import train
from mcore_rl.controller.start import open_run
from mcore_rl.tracking.report import write_report


async def run_training(config: RunConfig) -> int:
    """Train, export the final weights, write the report; 0.

    Ctrl-C ends the processes and says how to go on; what it raises then is KeyboardInterrupt's kin.
    """
    directory, console = Path(config.trainer.default_local_dir), Console(stderr=True)
    try:
        async with open_run(config) as run:
            await train(run)
            if not config.trainer.val_only:
                if run.saved_step != run.progress.step:
                    await run.save()
                exported = await run.export("final")
    except (asyncio.CancelledError, KeyboardInterrupt):
        kept = complete_checkpoints(directory)
        words = f"Stopped. {kept[-1]} is complete" if kept else "Stopped before the first checkpoint"
        go_on = ": the same command goes on from there (trainer.resume_mode=auto)" if kept else ""
        console.print(f"{words}{go_on}.", markup=False, highlight=False, soft_wrap=True)
        raise
    report = write_report(directory)
    out = Console()
    if not config.trainer.val_only:
        out.print(f"final weights: {exported}", markup=False, highlight=False, soft_wrap=True)
    out.print(f"report: {report}", markup=False, highlight=False, soft_wrap=True)
    return 0
