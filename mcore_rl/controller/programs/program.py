"""What every training program does around its steps: restarts, preemption, the final weights, the report."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, nullcontext
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mcore_rl.config.offline import OfflineConfig
from mcore_rl.config.run import RunConfig, run_violations
from mcore_rl.config.trainer import PUSH
from mcore_rl.controller.lifecycle.fault_tolerance import run_with_restarts
from mcore_rl.controller.lifecycle.hub_pushes import BEST, FINAL, HubPushes
from mcore_rl.controller.lifecycle.messages import note, outcome, warn
from mcore_rl.controller.lifecycle.preparation import FinishedError, PreparedRun
from mcore_rl.controller.lifecycle.resume_check import note_differences
from mcore_rl.controller.lifecycle.start_plan import doubts_of
from mcore_rl.controller.step.preemption import REQUEUE, Preempted, Preemption
from mcore_rl.controller.training_run import C, Callback, R
from mcore_rl.ground.errors import refuse_if_any
from mcore_rl.hub.push import target
from mcore_rl.parallel.device import Platform
from mcore_rl.planning.plan import Plan
from mcore_rl.planning.tables import plan_tables
from mcore_rl.runtime.scratch import scratch
from mcore_rl.tracking.report import write_report
from mcore_rl.tracking.run_directory import write_finished
from mcore_rl.tracking.run_files import read_run
from mcore_rl.tracking.run_owner import RunOwner, demand_free
from mcore_rl.tracking.verdict import best, gain


async def run_program(
    config: C,
    open_run: Callable[[C], AbstractAsyncContextManager[R]],
    train: Callable[[R], Awaitable[None]],
    callbacks: Sequence[Callback] = (),
    living: AbstractAsyncContextManager[object] | None = None,
) -> int:
    """Train to the end, export the final weights, write the report.

    The run owns its directory until it has ended: another start there is refused.
    A run of which a training process dies begins again from its newest checkpoint, ``trainer.max_restarts`` times.
    A finished run is refused, unless Slurm queued its job again: its node may die between the run's end and the job's.
    Ctrl-C ends the processes and says how to go on; it raises KeyboardInterrupt or a subclass.

    Args:
        open_run: starts the processes of a run, and ends them when it is left; reads the newest checkpoint.
        train: takes all the steps that are left.
        living: closes what a run leaves to the one that begins again; None: nothing.
        callbacks: see ``training_run.Callback``.

    Returns:
        The exit code: 0, or ``REQUEUE`` if a signal or a callback made the run leave before its end.
    """
    refuse_if_any(run_violations(config) if isinstance(config, RunConfig) else config.violations())
    directory = Path(config.trainer.default_local_dir).resolve()
    owner = RunOwner(directory, say=note)
    pushes: HubPushes | None = None

    async def attempt(config: C) -> tuple[Path, int] | None:
        preemption = Preemption()

        async def begin(run: R) -> None:
            run.preemption = preemption
            run.owner = owner
            run.callbacks = callbacks
            run.pushes = pushes
            await train(run)

        async with AsyncExitStack() as stack:
            run = await preemption.open_and_train(stack.enter_async_context(open_run(config)), begin)
            if config.trainer.val_only:
                return None
            try:
                await run.conclude_saving()
            finally:
                exported = await run.export(FINAL)
            if pushes is not None:
                await pushes.add(*([BEST] if run.progress.best_step > 0 else []), FINAL)
        return exported, run.progress.step

    # Before anything is imported or started that makes temporary files, as wandb does.
    with owner, scratch(), ExitStack() as closing:
        if config.trainer.push_to_hub is not None:  # once the directory is this run's
            repository = target(config.trainer.push_to_hub, private=True, key=PUSH)
            pushes = HubPushes(repository, directory, note=note, warn=warn)
            closing.callback(pushes.close)
        try:
            async with living or nullcontext():
                done = await run_with_restarts(config, attempt)
        except Preempted as left:
            outcome(str(left))
            return REQUEUE
        except FinishedError as finished:
            if not owner.job_began_again:
                raise
            outcome(f"{directory}: {finished.violations[0].problem}")
            return 0
        report = write_report(directory)
        if (learned := what_was_learned(directory)) is not None:
            Console().print(learned)
        if done is not None:
            exported, step = done
            outcome(f"final weights: {exported}")
            if pushes is not None:
                await _concluded(pushes)
            write_finished(directory, step)  # last: one that is stopped in between may go on, and upload
        outcome(f"report: {report}")
    return 0


async def _concluded(pushes: HubPushes) -> None:
    """Waits for the uploads, and says what came of them also where Ctrl-C ends the waiting."""
    try:
        await pushes.conclude()
    finally:
        for line in pushes.outcomes():
            outcome(line)


def show_check(config: RunConfig | OfflineConfig, prepared: PreparedRun, planned: Plan, platform: Platform) -> None:
    """Shows whether a run that is only checked would begin, and then its plan.  ConfigError: its directory is taken."""
    demand_free(Path(config.trainer.default_local_dir))
    doubts = [*planned.notes, *doubts_of(config, platform)]
    begins = f"goes on from {prepared.checkpoint}" if prepared.checkpoint else "begins anew"
    verdict = f"{len(doubts)} doubts, below" if len(doubts) > 1 else "a doubt, below" if doubts else "nothing is wrong"
    outcome(f"{verdict}: a run of {prepared.num_steps:,} steps, which {begins}. Nothing was started")
    for each in doubts:
        outcome(f"  - {each}")
    if prepared.checkpoint is not None:
        note_differences(prepared.identity, prepared.checkpoint)
    Console().print(plan_tables(planned))


def what_was_learned(directory: Path) -> Table | None:
    """Validation accuracy before and after, by data source; None where there is only one validation."""
    by_source = {source: each for source, each in read_run(directory).accuracies.items() if len(each) > 1}
    if not by_source:
        return None
    table = Table("held-out accuracy", "first", "best", "last", "gain", "judged by", box=None, pad_edge=False)
    for source, accuracies in by_source.items():
        first = accuracies[0]
        last = accuracies[-1]
        change = gain(first, last)
        sure = "" if change.significant else " (may be chance)"
        shown = [f"{each.mean:.1%}" for each in (first, best(accuracies), last)]
        table.add_row(source, *shown, f"{100 * change.points:+.1f} points{sure}", change.basis)
    return table
