"""Engines that join and leave a run that goes on, from the command line: no prompt is lost, and none comes twice."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ahead_runs import APART, lines, prompts, staleness
from tests.support.crash_runs import Started, doing, nothing_survives, says, start
from tests.support.run_task import holders_of, still_alive, write_task

pytestmark = [pytest.mark.tier("full"), pytest.mark.timeout(2400), pytest.mark.usefixtures("processes")]
BOUND = 2
MODES = {
    "async": ("trainer.mode=async", f"async.max_staleness={BOUND}", *APART),
    "one_step_off": ("trainer.mode=one_step_off", *APART),
    "sync": ("trainer.mode=sync", *APART),
}
ROWS, STEPS = 40, 5000  # prompts of the task; steps, far more than a run makes while an engine starts


def engines(directory: Path, *words: str) -> tuple[int, str]:
    """``mcore-rl engines RUN WORDS``: its exit code, and what it says."""
    command = [sys.executable, "-m", "mcore_rl.cli", "engines", str(directory), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    return done.returncode, done.stdout + done.stderr


def after(run: Started, steps: int) -> None:
    """Returns when ``steps`` more steps are done."""
    goal = run.num_logged + steps
    run.until(lambda run: run.num_logged >= goal)


def demand_each_prompt_once(directory: Path, steps: int) -> None:
    """By what the run wrote down of every step: within each epoch, no prompt twice."""
    drawn = prompts(directory, steps)
    for epoch in range(0, len(drawn), ROWS):
        of_epoch = drawn[epoch : epoch + ROWS]
        assert len(set(of_epoch)) == len(of_epoch), "a prompt was trained twice in an epoch"


@pytest.mark.parametrize("mode", MODES)
def test_an_engine_joins_and_draws_and_another_leaves(mode: str, tmp_path: Path) -> None:
    (tmp_path / "task").mkdir()
    task, directory = write_task(tmp_path / "task"), tmp_path / "run"
    with nothing_survives(tmp_path) as traces:
        run = start(task, directory, traces, *MODES[mode], "trainer.save_freq=0", steps=STEPS)
        after(run, 1)
        code, said = engines(directory, "--add", "99", "--remove", "engine-7")
        assert code == 2 and "--add=99" in said and "engine-7" in said and "Traceback" not in said, said
        code, said = engines(directory, "--remove", "engine-0")
        assert code == 2 and "without an engine that draws" in said, said
        code, said = engines(directory, "--add", "1")
        assert code == 0 and re.search(r"engine 1: draws, with weights of version \d+", said), said
        after(run, 2)
        code, said = engines(directory)
        assert code == 0 and len(re.findall(r"engine \d +(drawing|idle)", said)) == 2, said
        newcomer = holders_of(directory / "logs" / "engine-1.log", run.process.pid)
        assert newcomer and sum(each.cpu_times().user for each in newcomer) > 0
        leaver = holders_of(directory / "logs" / "engine-0.log", run.process.pid)
        code, said = engines(directory, "--remove", "engine-0")
        assert code == 0 and "engine 0: has left" in said, said
        assert not still_alive(leaver), "its processes end"
        after(run, 2)  # engine 1 draws alone
        code, said = engines(directory)
        assert code == 0 and "engine 0" not in said and "engine 1" in said, said
        run.process.terminate()
        assert run.finish() == 75, run.said()
        assert "Traceback" not in run.said() and "never retrieved" not in run.said(), run.said()
    code, said = engines(directory)
    assert code == 2 and "no run goes on there" in said, said
    rows = lines(directory)
    assert max(most for _, most in staleness(rows)) <= {"async": BOUND, "one_step_off": 1, "sync": 0}[mode]
    demand_each_prompt_once(directory, len(rows))


def test_a_trainer_dies_and_its_engines_live_on(tmp_path: Path) -> None:
    """One had joined; both are the processes that they were when the run has begun again, and are updated."""
    (tmp_path / "task").mkdir()
    task, directory = write_task(tmp_path / "task"), tmp_path / "run"
    with nothing_survives(tmp_path) as traces:
        run = start(task, directory, traces, *MODES["async"], steps=STEPS)
        after(run, 1)
        code, said = engines(directory, "--add", "1")
        assert code == 0, said
        after(run, 1)
        alive = {
            each.pid for name in "01" for each in holders_of(directory / "logs" / f"engine-{name}.log", run.process.pid)
        }
        step = run.num_logged
        run.strike_at(doing(step + 1, "train_step"), "actor-rank-0.log")
        run.until(says(r"restart 1 of 3(.|\n)*engine 0, engine 1: alive, and kept"))
        after(run, 3)
        still = {
            each.pid for name in "01" for each in holders_of(directory / "logs" / f"engine-{name}.log", run.process.pid)
        }
        assert alive <= still, "no process of an engine was started again"
        code, said = engines(directory)
        assert code == 0 and len(re.findall(r"engine \d +(drawing|idle)", said)) == 2, said
        run.process.terminate()
        assert run.finish() == 75, run.said()
        again = start(task, directory, traces, *MODES["async"], steps=STEPS)
        after(again, 1)
        code, said = engines(directory)
        assert code == 0 and "engine 0" in said and "engine 1" not in said, "a new start has as many as rollout.dp says"
        again.process.terminate()
        assert again.finish() == 75, again.said()
    rows = lines(directory)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert max(most for _, most in staleness(rows)) <= BOUND
    demand_each_prompt_once(directory, len(rows))
