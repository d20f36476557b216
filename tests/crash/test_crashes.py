"""Runs that are killed, whoever and whenever, and end with the bits of one that never was.

Every case is one run and what happens to it, one blow after the other: who is struck, at which moment of which step,
and what becomes of the run; where it ends, the same command begins it again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGSTOP, SIGTERM, SIGUSR1

import pytest

from mcore_rl.controller.step.preemption import REQUEUE
from tests.crash.conftest import Undisturbed
from tests.support import crash_points
from tests.support.crash_runs import (
    Moment,
    bits_of,
    doing,
    drawing,
    grading,
    nothing_survives,
    says,
    start,
    starting,
    writing,
)

GOES_ON = None


@dataclass(frozen=True)
class Blow:
    """moment: when.  victim: of ``Started.victims``.  signal: that it gets.

    exit_code: of the run; GOES_ON: it does, by itself.  words: that it says, as a regular expression.
    point: instead of all that, the point at which the controller kills itself.
    """

    moment: Moment | None
    victim: str = "controller"
    signal: int = SIGKILL
    exit_code: int | None = -SIGKILL
    words: str = ""
    point: str = ""


def worker(moment: Moment, rank: int, which: int) -> Blow:
    """A training process dies."""
    return Blow(moment, f"actor-rank-{rank}.log", exit_code=GOES_ON, words=f"restart {which} of 3")


def engine(moment: Moment, which: int) -> Blow:
    """The engine dies."""
    words = rf"engine 0: started again, {which} of 3(.|\n)*engine 0: ready after"
    return Blow(moment, "engine-0.log", exit_code=GOES_ON, words=words)


def stopped(moment: Moment, which: int, doing: str) -> Blow:
    """The engine stands still.  doing: while what it is noticed."""
    words = rf"engine 0 hangs while {doing}(.|\n)*stopped \(state T\)(.|\n)*engine 0: started again, {which} of 3"
    words += r"(.|\n)*engine 0: ready after"
    return Blow(moment, "engine-0.log", SIGSTOP, exit_code=GOES_ON, words=words)


def ray(moment: Moment, name: str) -> Blow:
    """A process of Ray's dies.  The checkpoint of the step before may still be on its way to the disk."""
    end = r"(There is no checkpoint yet\.|.* is complete: the same command goes on from there)"
    words = rf"error: Ray's .*{name}, process \d+\) died\. {end}"
    return Blow(moment, name, exit_code=REQUEUE, words=words)


def told(moment: Moment, signal: int, step: int) -> Blow:
    """The run is told to leave, and does after ``step``; 0: before it began."""
    words = f"left after step {step}, on SIG" if step else "left before it began, on SIG"
    return Blow(moment, signal=signal, exit_code=REQUEUE, words=words)


def interrupted(moment: Moment) -> Blow:
    """A Ctrl-C at ``moment``."""
    return Blow(moment, signal=SIGINT, exit_code=130, words="the same command goes on from there")


def itself(point: str) -> Blow:
    """The controller dies at a point of giving a checkpoint its name."""
    return Blow(None, point=point)


UPDATE = "train_step"
LIVES = {
    "a worker and an engine": [worker(doing(2, UPDATE), 1, 1), engine(drawing(3), 1)],
    "the controller, and SIGTERM": [Blow(doing(2, UPDATE)), told(drawing(3), SIGTERM, 2)],
    "the controller": [Blow(drawing(2)), Blow(grading(2)), Blow(doing(2, "score")), Blow(doing(2, "publish"))],
    "the controller, saving": [
        Blow(writing(2)),
        itself(crash_points.HALF),
        itself(crash_points.BEFORE),
        itself(crash_points.AFTER),
    ],
    "workers": [worker(drawing(2), 0, 1), worker(doing(3, "score"), 1, 2)],
    "workers, publishing and saving": [worker(doing(2, "publish"), 1, 1), worker(writing(2), 0, 2)],
    "engines": [engine(grading(2), 1), engine(doing(2, UPDATE), 2), engine(drawing(3), 3)],
    "engines, asleep": [engine(doing(2, "score"), 1), engine(doing(2, "publish"), 2), engine(writing(2), 3)],
    "engines, stopped": [
        stopped(drawing(2), 1, r"generating \d+ samples"),
        stopped(doing(2, "score"), 2, "waking up"),
        stopped(grading(3), 3, r"(generating \d+ samples|going to sleep)"),
    ],
    "Ray": [ray(drawing(2), "gcs_server"), ray(doing(2, UPDATE), "raylet"), ray(writing(2), "gcs_server")],
    "signals": [
        told(doing(2, UPDATE), SIGUSR1, 2),
        interrupted(drawing(3)),
        interrupted(doing(3, UPDATE)),
    ],
    "signals, starting and saving": [
        told(starting, SIGTERM, 0),
        told(writing(2), SIGTERM, 2),
        told(grading(3), SIGUSR1, 2),
    ],
}
# Two processes as if on two nodes: weights go in rounds and through a device's memory, not through one shared memory.
TWO_NODES = ("trainer.nnodes=2", "trainer.n_gpus_per_node=1")
# What took a second hangs after 20; a member of a weight update waits 60 for another.
IMPATIENT = ("trainer.watchdog.least_s=20", "trainer.timeout_s=60")
SETTINGS = {
    "a worker and an engine": TWO_NODES,
    "workers, publishing and saving": TWO_NODES,
    "engines, stopped": IMPATIENT,
}
# In the tier `ci`; the others are of the tier `full`: ``pytest --tier=full tests/crash``.
QUICK = ("a worker and an engine",)


@pytest.mark.timeout(2400)  # up to five starts of a run, on a busy machine
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.tier("full")) for name in LIVES]
)
def test_deaths_change_no_bit(name: str, undisturbed: Undisturbed, tmp_path: Path) -> None:
    more = SETTINGS.get(name, ())
    with nothing_survives(tmp_path) as traces:
        begun = False
        for blow in LIVES[name]:
            if not begun or blow.point:
                run = start(undisturbed.task, tmp_path / "run", traces, *more, point=blow.point)
            if blow.moment is not None:
                run.strike_at(blow.moment, blow.victim, blow.signal)
            begun = blow.exit_code is GOES_ON
            if begun:
                run.until(says(blow.words))
            else:
                assert run.finish() == blow.exit_code, run.said()
                assert says(blow.words)(run), run.said()
                assert "Traceback" not in run.said() or blow.exit_code == -SIGKILL, run.said()
        if not begun:
            run = start(undisturbed.task, tmp_path / "run", traces, *more)
        assert run.finish() == 0, run.said()
    bits = bits_of(tmp_path / "run")
    assert bits.metrics == undisturbed.bits.metrics
    assert bits.rollouts == undisturbed.bits.rollouts
    assert bits.states == undisturbed.bits.states and bits.states


@pytest.mark.timeout(1200)
@pytest.mark.tier("full")
@pytest.mark.parametrize("nodes", [(), TWO_NODES], ids=["shared memory", "rounds"])
def test_an_engine_that_stands_still_while_it_receives_changes_no_bit(
    nodes: tuple[str, ...], undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """The training ranks, which wait for it, give up by themselves, and send all of it again to the next one."""
    with nothing_survives(tmp_path) as traces:
        run = start(undisturbed.task, tmp_path / "run", traces, *IMPATIENT, *nodes)
        run.until(doing(3, "score"))
        victims = run.victims("engine-0.log")
        run.until(doing(3, "publish"))
        run.hit(victims, SIGSTOP)
        run.until(says(r"engine 0 hangs while (running sync_receive|finishing the update to version 3)"))
        run.until(says(r"engine 0: started again, 1 of 3(.|\n)*engine 0: ready after"))
        assert run.finish() == 0, run.said()
        assert "restart 1 of 3" not in run.said(), "no training process was at fault"
    bits = bits_of(tmp_path / "run")
    assert bits.metrics == undisturbed.bits.metrics
    assert bits.rollouts == undisturbed.bits.rollouts
    assert bits.states == undisturbed.bits.states and bits.states
