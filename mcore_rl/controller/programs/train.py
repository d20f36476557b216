"""``mcore-rl train``: a run from its start to its report."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mcore_rl.config.run import RunConfig
from mcore_rl.controller.lifecycle.fault_tolerance import run_with_restarts
from mcore_rl.controller.lifecycle.messages import outcome
from mcore_rl.controller.lifecycle.preemption import REQUEUE, Preempted, Preemption
from mcore_rl.controller.lifecycle.start import open_run
from mcore_rl.controller.loop import train
from mcore_rl.controller.run import Run
from mcore_rl.tracking.report import write_report
from mcore_rl.tracking.run_files import read_run
from mcore_rl.tracking.verdict import best, gain


async def run_training(config: RunConfig) -> int:
    """Train, export the final weights, write the report; 0, or ``REQUEUE`` where a signal made it leave before the end.

    A run of which a training process dies is begun again from its newest checkpoint, ``trainer.max_restarts`` times.
    Ctrl-C ends the processes and says how to go on; what it raises then is KeyboardInterrupt's kin.
    """
    try:
        exported = await run_with_restarts(config, _attempt)
    except Preempted as left:
        outcome(str(left))
        return REQUEUE
    directory = Path(config.trainer.default_local_dir)
    report = write_report(directory)
    if (learned := what_was_learned(directory)) is not None:
        Console().print(learned)
    if exported is not None:
        outcome(f"final weights: {exported}")
    outcome(f"report: {report}")
    return 0


async def _attempt(config: RunConfig) -> Path | None:
    """From the newest checkpoint to the end; where the final weights are.  Preempted: it was told to, and has saved."""
    leaving = Preemption()

    async def begin(run: Run) -> None:
        run.leaving = leaving
        await train(run)

    async with AsyncExitStack() as stack:
        run = await leaving.unless_told(stack.enter_async_context(open_run(config)), begin)
        if config.trainer.val_only:
            return None
        try:
            await run.conclude_saving()
        finally:
            exported = await run.export("final")
    return exported


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
