"""``mcore-rl train``: a run from its start to its report."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mcore_rl.config.run import RunConfig
from mcore_rl.controller.checkpoints import how_to_go_on
from mcore_rl.controller.loop import train
from mcore_rl.controller.start import open_run
from mcore_rl.tracking.report import write_report
from mcore_rl.tracking.run_files import read_run
from mcore_rl.tracking.verdict import best, gain


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
        console.print(how_to_go_on(directory), markup=False, highlight=False, soft_wrap=True)
        raise
    report, out = write_report(directory), Console()
    if (learned := what_was_learned(directory)) is not None:
        out.print(learned)
    if not config.trainer.val_only:
        out.print(f"final weights: {exported}", markup=False, highlight=False, soft_wrap=True)
    out.print(f"report: {report}", markup=False, highlight=False, soft_wrap=True)
    return 0


def what_was_learned(directory: Path) -> Table | None:
    """Validation accuracy before and after, by data source; None where there is only one validation."""
    found = {source: each for source, each in read_run(directory).accuracies.items() if len(each) > 1}
    if not found:
        return None
    table = Table("held-out accuracy", "first", "best", "last", "gain", "judged by", box=None, pad_edge=False)
    for source, accuracies in found.items():
        first, last = accuracies[0], accuracies[-1]
        change = gain(first, last)
        sure = "" if change.significant else " (may be chance)"
        shown = [f"{each.mean:.1%}" for each in (first, best(accuracies), last)]
        table.add_row(source, *shown, f"{100 * change.points:+.1f} points{sure}", change.basis)
    return table
