"""Runs that are killed, whoever and whenever, and end with the bits of one that never was.

Every case is one run: who dies, at which moment of which step, what becomes of the run, and, where it ended, the same
command again.  The reference is one run without a death.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from mcore_rl.controller.leaving import REQUEUE
from tests.support import crash_runs
from tests.support.crash_runs import (
    SIGINT,
    SIGKILL,
    SIGTERM,
    SIGUSR1,
    Bits,
    Started,
    bits_of,
    doing,
    drawing,
    nothing_survives,
    start,
)
from tests.support.run_task import write_task


@dataclass(frozen=True)
class Death:
    """moment: when.  victim: a log, whose writers are killed; "" is the controller, which gets ``signal``.

    exit_code: of the run that it happens to; 0: it goes on by itself, and says ``words``.
    """

    moment: Callable[[Started], bool]
    victim: str = ""
    signal: int = SIGKILL
    exit_code: int = -SIGKILL
    words: str = ""


DEATHS = {
    "controller, drawing": Death(drawing(2)),
    "controller, scoring": Death(doing(2, "score")),
    "controller, updating": Death(doing(2, "train_step")),
    "controller, publishing": Death(doing(3, "publish")),
    "controller, saving": Death(crash_runs.writing(2)),
    "controller, checkpoint just named": Death(crash_runs.named(2)),
    "trainer, drawing": Death(drawing(2), "actor-rank-1.log", exit_code=0, words="restart 1 of 3"),
    "trainer, updating": Death(doing(2, "train_step"), "actor-rank-1.log", exit_code=0, words="restart 1 of 3"),
    "engine, drawing": Death(drawing(2), "engine-0.log", exit_code=0, words="engine 0: started again, 1 of 3"),
    "engine, updating": Death(doing(2, "train_step"), "engine-0.log", exit_code=0, words="engine 0: started again"),
    "engine, publishing": Death(doing(2, "publish"), "engine-0.log", exit_code=0, words="engine 0: started again"),
    "SIGTERM, drawing": Death(drawing(2), signal=SIGTERM, exit_code=REQUEUE, words="left after step 1, on SIGTERM"),
    "SIGUSR1, updating": Death(
        doing(2, "train_step"), signal=SIGUSR1, exit_code=REQUEUE, words="left after step 2, on SIGUSR1"
    ),
    "Ctrl-C, drawing": Death(drawing(2), signal=SIGINT, exit_code=130, words="the same command goes on from there"),
}
# One of each kind where minutes count; the others with ``pytest -m thorough tests/crash``.
QUICK = ("controller, updating", "trainer, updating", "engine, drawing", "SIGTERM, drawing")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def undisturbed(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Bits:
    run = start(task, tmp_path_factory.mktemp("undisturbed") / "run")
    assert run.finish() == 0, run.said()
    return bits_of(run.directory)


@pytest.mark.timeout(1200)  # two starts of a run, on a busy machine
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.thorough) for name in DEATHS]
)
def test_a_death_changes_no_bit(name: str, task: Path, undisturbed: Bits, tmp_path: Path) -> None:
    death = DEATHS[name]
    with nothing_survives() as mark:
        run = start(task, tmp_path / "run", mark)
        run.until(death.moment)
        if death.victim:
            run.kill(death.victim)
        else:
            run.process.send_signal(death.signal)
        assert run.finish() == death.exit_code, run.said()
        assert death.words in run.said()
        assert "Traceback" not in run.said() or death.exit_code == -SIGKILL
        if death.exit_code:
            again = start(task, tmp_path / "run", mark)
            assert again.finish() == 0, again.said()
    found = bits_of(tmp_path / "run")
    assert found.metrics == undisturbed.metrics
    assert found.rollouts == undisturbed.rollouts
    assert found.states == undisturbed.states and found.states
