"""Rollouts that are drawn while a step is trained, from the command line, with a real engine."""

from __future__ import annotations

from pathlib import Path
from signal import SIGKILL, SIGTERM

import pytest

from mcore_rl.cli import main
from mcore_rl.controller.rollouts.rollout_source import DRAWN_AHEAD
from mcore_rl.controller.step.preemption import REQUEUE
from mcore_rl.tracking.clock import read_timeline
from tests.support.ahead_runs import APART, lines, prompts, same_training, staleness, versions
from tests.support.crash_runs import doing, drawing, nothing_survives, says, start
from tests.support.run_task import nothing_left, overrides, write_task

STEPS = 3
MODE = ("trainer.mode=one_step_off", *APART)


def test_the_next_step_is_drawn_while_a_step_is_trained(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], fast_ray: None
) -> None:
    (tmp_path / "task").mkdir()
    task, directory = write_task(tmp_path / "task"), tmp_path / "run"
    more = (f"trainer.total_training_steps={STEPS}", *MODE)
    with nothing_left():
        assert main(["train", *overrides(task, directory, "trainer.record_rollouts=true", *more)]) == 0
    assert "never retrieved" not in "".join(capfd.readouterr())
    rows = lines(directory)
    assert staleness(rows) == [(0, 0), (1, 1), (1, 1)]
    assert [versions(directory, step) for step in (1, 2, 3)] == [{0}, {0}, {1}]
    assert [row["progress/epoch"] for row in rows] == [8 / 40, 16 / 40, 24 / 40], "what is drawn ahead does not count"
    assert len(set(prompts(directory, STEPS))) == 8 * STEPS
    # The sampler's weights are one version old in the second step, and the trainer's own in the first.
    assert rows[0]["rollout/logprob_diff_max"] < 1e-4 < rows[1]["rollout/logprob_diff_max"]
    timeline = read_timeline(directory / "timeline.jsonl")
    for step in (1, 2):
        (ahead,) = [span for span in timeline[step] if span.phase == DRAWN_AHEAD]
        (update,) = [span for span in timeline[step] if span.phase == "update_actor"]
        logprobs = next(span for span in timeline[step] if span.phase == "logprobs")
        last_sync = max((span for span in timeline[step] if span.phase == "sync"), key=lambda span: span.start)
        assert ahead.start < logprobs.end and ahead.start < update.start
        assert min(ahead.end, update.end) > logprobs.start, "drawing and the trainer's work overlap"
        assert ahead.end <= last_sync.start, "nothing is drawn while engines receive weights"
    assert not [span for span in timeline[STEPS] if span.phase == DRAWN_AHEAD], "the last step draws nothing ahead"
    assert main(["audit", str(directory)]) == 0
    with nothing_left():
        assert main(["train", *overrides(task, tmp_path / "replayed", f"trainer.replay={directory}", *more)]) == 0
    same_training(directory, tmp_path / "replayed", STEPS)


@pytest.mark.tier("full")
@pytest.mark.timeout(1200)
def test_deaths_lose_no_prompt_and_double_none(tmp_path: Path, processes: None) -> None:
    """An engine that dies while it draws ahead, the controller killed, a signal; then to the end."""
    (tmp_path / "task").mkdir()
    task, directory, steps = write_task(tmp_path / "task"), tmp_path / "run", 5
    with nothing_survives(tmp_path) as traces:
        run = start(task, directory, traces, *MODE, steps=steps)
        run.strike_at(doing(2, "score"), "engine-0.log")
        run.until(says(r"engine 0: started again, 1 of 3(.|\n)*engine 0: ready after"))
        anew = says(r"engine 0 died while generating \d+ samples")(run)  # else it had drawn step 3 already
        run.strike_at(doing(3, "train_step"), "controller", SIGKILL)
        assert run.finish() == -SIGKILL
        run = start(task, directory, traces, *MODE, steps=steps)
        run.strike_at(doing(4, "train_step"), "controller", SIGTERM)
        assert run.finish() == REQUEUE, run.said()
        assert says("left after step 4, on SIGTERM")(run), run.said()
        assert "Traceback" not in run.said() and "never retrieved" not in run.said()
        run = start(task, directory, traces, *MODE, steps=steps)
        run.strike_at(drawing(5), "controller", SIGTERM)
        assert run.finish() == REQUEUE, run.said()
        run = start(task, directory, traces, *MODE, steps=steps)
        assert run.finish() == 0, run.said()
    rows = lines(directory)
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    ages = [age for age, _ in staleness(rows)]
    assert staleness(rows) == [(age, age) for age in ages], "no step mixes versions"
    # A checkpoint has what was drawn ahead, unless a signal ended the draw: then step 5 is drawn with newest weights.
    assert ages == [0, 1, 0 if anew else 1, 1, 0]
    drawn = prompts(directory, steps)
    assert len(set(drawn)) == len(drawn) == 8 * steps, "no prompt is lost, and none comes twice"
    assert rows[-1]["progress/epoch"] == 1.0
