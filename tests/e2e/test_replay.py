"""Runs that were killed are audited, and replayed from what they recorded; from the command line, with real engines."""

from __future__ import annotations

import json
from pathlib import Path
from signal import SIGKILL

import pytest

from mcore_rl.cli import main
from mcore_rl.tracking.ledger import audit
from tests.support.ahead_runs import APART, prompts, same_training, staleness
from tests.support.ahead_runs import lines as metric_lines
from tests.support.crash_runs import Traces, bits_of, doing, nothing_survives, start
from tests.support.run_task import write_task

pytestmark = [pytest.mark.tier("full"), pytest.mark.timeout(1800), pytest.mark.usefixtures("processes")]

BOUND, RECORD = 2, "trainer.record_rollouts=true"
MODE = ("trainer.mode=async", f"async.max_staleness={BOUND}", *APART)


def test_an_async_run_that_was_killed_lost_no_prompt_and_is_replayed_bit_for_bit(tmp_path: Path) -> None:
    """Killed while it trains, with groups in the buffer: the checkpoint has them, and they are not drawn again."""
    (tmp_path / "task").mkdir()
    task, directory, replayed, steps = write_task(tmp_path / "task"), tmp_path / "run", tmp_path / "replayed", 5
    with nothing_survives(tmp_path) as traces:
        run = start(task, directory, traces, *MODE, RECORD, steps=steps)
        run.strike_at(doing(3, "train_step"), "controller", SIGKILL)
        assert run.finish() == -SIGKILL
        kept = directory / "checkpoints" / f"step_{last_saved(directory)}" / "drawn.parquet"
        assert kept.is_file() and str(kept.name) in (kept.parent / "manifest.json").read_text()
        assert audit(directory).violations == (), "killed at any moment"
        run = start(task, directory, traces, *MODE, RECORD, steps=steps)
        assert run.finish() == 0, run.said()
        assert main(["audit", str(directory)]) == 0
        drawn = prompts(directory, steps)
        assert len(set(drawn)) == len(drawn) == 8 * steps, "no prompt is lost, and none comes twice"
        rows = metric_lines(directory)
        # What was in flight when it died is drawn again, by newer weights: a step after it may be less stale.
        assert 0 < max(most for _, most in staleness(rows)) <= BOUND
        replay = f"trainer.replay={directory}"
        again = start(task, replayed, traces, *MODE, replay, steps=steps)  # its grader has another name
        assert again.finish() == 0, again.said()
        assert "nothing is drawn or graded" in again.said()
        assert not [*(replayed / "logs").glob("engine-*")], "no engine was started"
        same_training(directory, replayed, steps)
        assert audit(replayed).violations == ()
        refused = start(
            task, tmp_path / "other", traces, *MODE, replay, "actor.optim.lr=1e-5", "rollout.temperature=0.5",
            steps=steps,
        )  # fmt: skip
        assert refused.finish() == 2
        assert "actor.optim.lr" in refused.said() and "rollout.temperature" in refused.said(), "all at once"
        assert "Traceback" not in refused.said()


def test_a_sync_run_is_replayed_bit_for_bit_and_to_rounding_in_another_layout(tmp_path: Path) -> None:
    (tmp_path / "task").mkdir()
    task, directory, steps = write_task(tmp_path / "task"), tmp_path / "run", 3
    with nothing_survives(tmp_path) as traces:
        run = start(task, directory, traces, RECORD, steps=steps)
        assert run.finish() == 0, run.said()
        assert main(["audit", str(directory)]) == 0
        replay = f"trainer.replay={directory}"
        _killed_and_again(task, tmp_path / "same", traces, steps, replay)
        same_training(directory, tmp_path / "same", steps)
        other = start(
            task,
            tmp_path / "other",
            traces,
            replay,
            "trainer.n_gpus_per_node=1",
            "actor.parallel.ep=1",
            steps=steps,
        )
        assert other.finish() == 0, other.said()
        assert "in another layout" in other.said() and "actor.parallel.ep: 2 then, 1 now" in other.said()
        there, here = metric_lines(directory), metric_lines(tmp_path / "other")
        for key in ("actor/loss", "actor/grad_norm", "actor/entropy"):
            assert [row[key] for row in here] == pytest.approx([row[key] for row in there], rel=1e-3, abs=1e-5), key
        (directory / "record" / "step_2.parquet").unlink()
        gone = start(task, tmp_path / "gone", traces, replay, steps=steps)
        assert gone.finish() == 2 and "step 2: schedule.jsonl has no line, or record/ no file of it" in gone.said()


def _killed_and_again(task: Path, directory: Path, traces: Traces, steps: int, replay: str) -> None:
    """A replay that is killed goes on as any run does."""
    run = start(task, directory, traces, replay, steps=steps)
    run.strike_at(doing(2, "train_step"), "controller", SIGKILL)
    assert run.finish() == -SIGKILL
    saved = last_saved(directory)
    run = start(task, directory, traces, replay, steps=steps)
    assert run.finish() == 0, run.said()
    assert bits_of(directory, steps).states
    assert json.loads((directory / "environment.json").read_text())["resumed_step"] == saved


def last_saved(directory: Path) -> int | None:
    """The step of the newest checkpoint that is whole, if any: each is written while the next step is computed."""
    names = [path.name[5:] for path in (directory / "checkpoints").iterdir()]
    return max((int(name) for name in names if name.isdecimal()), default=None)
