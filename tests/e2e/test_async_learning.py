"""`make train`'s task in ``trainer.mode=async``: it learns as in sync, and a run that should not go on is reported.

One start of all processes (a trainer of one process, an engine beside it), gone through by one mode after the other
from the same weights: those of `make train`'s fine-tuning.  Every mode trains the same number of samples with the same
settings, and the weights of the docs where samples are up to 4 versions old.  Correction is off where the guard is to
see that it is needed.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest

from mcore_rl.config.asynchrony import trains_stale
from mcore_rl.config.launch import load_recipe
from mcore_rl.config.run import RunConfig
from mcore_rl.controller.lifecycle.device_sharing import DeviceSharing
from mcore_rl.controller.lifecycle.preparation import complete, prepare
from mcore_rl.controller.loop import train
from mcore_rl.controller.programs.start import open_run
from mcore_rl.controller.rollouts.rollout_source import Ahead
from mcore_rl.controller.run import Run
from mcore_rl.controller.step.rollout_collection import RolloutCollector
from mcore_rl.ground.errors import AlarmError, DeadEngineError
from mcore_rl.parallel.device import detect
from mcore_rl.tracking.jsonl import read_metrics
from mcore_rl.tracking.sinks import Tracker
from tests.support import fine_tuned
from tests.support.ahead_runs import APART

pytestmark = [pytest.mark.tier("full"), pytest.mark.timeout(7200)]

STEPS = 80  # as `make train`
POINTS = 0.03
SETTINGS = (
    *APART, "trainer.test_freq=1000", "trainer.save_freq=0", "trainer.val_before_train=false", "trainer.logger=[]",
    "rollout.val_kwargs.n=4",
)  # fmt: skip
MODES = {
    "sync": (),
    "async 1": ("trainer.mode=async", "async.max_staleness=1"),
    "async 4": ("trainer.mode=async", "async.max_staleness=4", "algorithm.off_policy=decoupled"),
}
GUARDED = (
    "trainer.mode=async", "async.max_staleness=8", "algorithm.off_policy=recompute", "actor.optim.lr=5e-3",
    "actor.optim.lr_schedule=constant", "trainer.guards.window=4", "trainer.guards.stop=true",
    "trainer.guards.entropy_share=0", "trainer.guards.reward_drop=10",  # which would come first
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """accuracy: on the held-out problems, after the last step.  staleness: the most, by step.  alarm: of a guard."""

    accuracy: float | None
    staleness: tuple[float, ...]
    alarm: str


def configuration(folder: Path, run: Path, *overrides: str) -> RunConfig:
    """Of the recipe of `make train`."""
    own = [*fine_tuned.files(folder), fine_tuned.model(folder), f"trainer.total_training_steps={STEPS}", *SETTINGS]
    made = load_recipe("arithmetic_grpo", [*own, f"trainer.default_local_dir={run}", *overrides])
    assert isinstance(made, RunConfig)
    return made


async def take(started: Run, folder: Path, name: str, *overrides: str) -> Outcome:
    """One run of ``STEPS`` with the processes of ``started``, from the first weights."""
    directory = folder / name.replace(" ", "-")
    config, platform = configuration(folder, directory, *overrides), detect(started.config.trainer.device)
    config = complete(config, platform)
    prepared = prepare(config, platform)
    await started.devices.to_trainer()
    for group in started.groups.values():
        await group.load_state(folder / "first" / group.role)
    assert started.collector is not None and isinstance(started.devices, DeviceSharing)
    collector = RolloutCollector(started.collector.engine, started.collector.scorer, config)
    pool = started.devices._engines
    ahead = Ahead(
        collector=collector.over(pool),
        is_dead=lambda: pool.death is not None,
        restart_dead=raised,
        recover=raised,
        interrupt=pool.interrupt,
    )
    groups, devices = started.groups, started.devices
    source = ahead if trains_stale(config) else None
    with Tracker.open(directory, config.trainer, {"name": name}, STEPS) as tracker:
        run = Run(config, platform, tracker, prepared, groups, collector, devices, ahead=source)
        return await outcome(run)


async def raised(death: DeadEngineError) -> None:
    """No engine is expected to die."""
    raise death


async def outcome(run: Run) -> Outcome:
    """What comes of a run that is ready to begin."""
    alarm = ""
    try:
        await train(run)
    except AlarmError as error:
        alarm = str(error)
    rows = read_metrics(run.directory / "metrics.jsonl")
    staleness = tuple(row["rollout/staleness_max"] for row in rows)
    return Outcome(rows[-1].get("val/arithmetic/accuracy"), staleness, alarm)


async def outcomes_of(folder: Path) -> dict[str, Outcome]:
    """Of every mode, and of the run that a guard is to stop, whose optimizer is another."""
    async with open_run(configuration(folder, folder / "first", *MODES["async 4"])) as started:
        for group in started.groups.values():
            (folder / "first" / group.role).mkdir()
            await group.save_state(folder / "first" / group.role, behind=False)
        taken = {name: await take(started, folder, name, *mode) for name, mode in MODES.items()}
    async with open_run(configuration(folder, folder / "guarded", *GUARDED)) as guarded:
        return taken | {"guarded": await outcome(guarded)}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, processes: None) -> dict[str, Outcome]:
    return asyncio.run(outcomes_of(fine_tuned.write(tmp_path_factory.mktemp("arithmetic"))))


@pytest.mark.parametrize("name", ["async 1", "async 4"])
def test_it_learns_what_sync_learns_from_as_many_samples(outcomes: dict[str, Outcome], name: str) -> None:
    sync, ahead = outcomes["sync"], outcomes[name]
    assert sync.accuracy is not None and ahead.accuracy is not None
    assert len(ahead.staleness) == len(sync.staleness) == STEPS
    assert max(sync.staleness) == 0 < max(ahead.staleness) <= int(name.partition(" ")[2])
    assert ahead.accuracy > sync.accuracy - POINTS, outcomes
    assert sync.alarm == ahead.alarm == ""


def test_a_guard_reports_what_old_samples_do_without_correction(outcomes: dict[str, Outcome]) -> None:
    guarded = outcomes["guarded"]
    assert "sampler and trainer differ" in guarded.alarm or "effective sample size" in guarded.alarm, guarded
    assert max(guarded.staleness) > 1
