"""What a replay reads and checks before a process is started, by ``mcore-rl train --check``."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_rl.cli import main
from mcore_rl.controller.lifecycle.preparation import prepare
from mcore_rl.controller.lifecycle.replay_check import keep_identity
from mcore_rl.controller.rollouts.recording import record_file
from mcore_rl.tracking.schedule import SCHEDULE, ScheduleFile
from tests.controller.lifecycle.test_preparation import CPU, config
from tests.controller.lifecycle.test_replay_check import line
from tests.support.run_task import overrides, write_task


def test_a_replay_is_checked_as_a_run_is_and_ends_where_its_record_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "task").mkdir()
    task, recorded = write_task(tmp_path / "task"), tmp_path / "run"
    made = prepare(config(task, recorded), CPU)
    recorded.mkdir()
    keep_identity(made.identity, recorded)
    file = ScheduleFile(recorded / SCHEDULE, keep=-1)
    for step in (1, 2, 3):
        file.write(line(step, made.settings_sum))
        record_file(recorded, step).touch()
    file.close()
    words = ["train", "--check", *overrides(task, tmp_path / "again", f"trainer.replay={recorded}")]
    assert main(words) == 0
    said = capsys.readouterr()
    assert "a run of 3 steps, which begins anew. Nothing was started" in " ".join((said.out + said.err).split())
    assert "ends with step 3 of 5: so does its replay" in " ".join(said.err.split())
    assert main([*words, "actor.optim.lr=0.5", "rollout.n=2"]) == 2
    said = capsys.readouterr()
    assert "2 problems" in said.err and "actor.optim.lr" in said.err and "Traceback" not in said.err
    assert not (tmp_path / "again").exists(), "nothing was started"
