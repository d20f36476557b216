"""``trainer.mode=async`` from the command line, with a real engine; ``test_partial.py`` has weights in flight."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any

import pytest

from mcore_rl.controller.rollouts.stream import DRAWING
from mcore_rl.controller.step.preemption import REQUEUE
from mcore_rl.tracking.clock import read_timeline
from mcore_rl.tracking.lanes import LANES, LaneSpan, State, read_lanes
from tests.support.ahead_runs import APART, lines, prompts, staleness, versions
from tests.support.crash_runs import bits_of, doing, drawing, nothing_survives, says, start
from tests.support.run_task import write_task

pytestmark = [pytest.mark.timeout(1200), pytest.mark.usefixtures("processes")]

STEPS, BOUND = 4, 2
MODE = ("trainer.mode=async", f"async.max_staleness={BOUND}", *APART)


def test_groups_are_drawn_while_steps_are_trained_and_none_is_older_than_the_bound(tmp_path: Path) -> None:
    (tmp_path / "task").mkdir()
    task, directory = write_task(tmp_path / "task"), tmp_path / "run"
    with nothing_survives(tmp_path) as traces:
        run = start(task, directory, traces, *MODE, "async.partial_rollout=false", steps=STEPS)
        assert run.finish() == 0, run.said()
    assert "never retrieved" not in run.said()
    rows = lines(directory)
    # Three batches are begun with version 0, and one with each version after it, until the last step has its own.
    assert staleness(rows) == [(0, 0), (1, 1), (2, 2), (2, 2)]
    assert [versions(directory, step) for step in range(1, STEPS + 1)] == [{0}, {0}, {0}, {1}]
    assert [row["rollout/buffer"] + row["rollout/under_way"] for row in rows] == [16, 16, 8, 0]
    assert [row["rollout/redrawn"] for row in rows] == [0] * STEPS
    assert [row["progress/epoch"] for row in rows] == [step * 8 / 40 for step in range(1, STEPS + 1)]
    assert len(set(prompts(directory, STEPS))) == 8 * STEPS
    timeline = read_timeline(directory / "timeline.jsonl")
    for step in (1, 2):
        (drawn,) = [span for span in timeline[step] if span.phase == DRAWING]
        logprobs = next(span for span in timeline[step] if span.phase == "logprobs")
        last_sync = max((span for span in timeline[step] if span.phase == "sync"), key=lambda span: span.start)
        assert drawn.start < logprobs.end and drawn.end > logprobs.start, "engines draw while the trainer works"
        assert drawn.end <= last_sync.start, "nothing is drawn while engines receive weights"
    assert [span for step in (3, 4) for span in timeline[step] if span.phase == DRAWING] == []
    lanes_show_it(directory, rows)


def lanes_show_it(directory: Path, rows: Sequence[dict[str, Any]]) -> None:
    """The lanes of the run above: the engine draws beside the trainer, then both change weights, together."""
    lanes = read_lanes(directory / LANES)
    assert [*lanes] == [1, 2, 3, 4] and all([*each.lanes] == ["trainer", "engine 0"] for each in lanes.values())
    for step, row in enumerate(rows, 1):
        each = lanes[step]
        seconds = {name: {state: total(spans, state) for state in State} for name, spans in each.lanes.items()}
        assert each.seconds == pytest.approx(row["time/step"], abs=1e-3)
        assert seconds["trainer"][State.updating] == pytest.approx(row["time/sync"], abs=0.01)
        engine = seconds["engine 0"]
        assert engine[State.updating] > 0 and engine[State.paused] > 0
        if step > 1:  # the first begins with the first weights, which no phase counts
            assert engine[State.updating] + engine[State.paused] < row["time/sync"]
        assert (engine[State.drawing] > 0) is (step < 3), "of which step 3 and 4 have no need"
        for name, key in (("engine 0", "perf/engines_idle_share"), ("trainer", "perf/trainer_idle_share")):
            assert row[key] == pytest.approx(1 - sum(seconds[name].values()) / each.seconds, abs=0.02)
    # What the second step begins to draw is not its own.
    drawn = [span for span in lanes[2].lanes["engine 0"] if span.state is State.drawing]
    trained = [span for span in lanes[2].lanes["trainer"] if span.state is State.training]
    assert any(one.start < other.end and other.start < one.end for one in drawn for other in trained)


def total(spans: Sequence[LaneSpan], state: State) -> float:
    return sum(span.end - span.start for span in spans if span.state is state)


@pytest.mark.tier("full")
def test_a_bound_of_0_has_the_bits_of_sync(tmp_path: Path) -> None:
    (tmp_path / "task").mkdir()
    task = write_task(tmp_path / "task")
    modes = {"sync": ["trainer.mode=sync"], "async": ["trainer.mode=async", "async.max_staleness=0"]}
    with nothing_survives(tmp_path) as traces:
        for name, mode in modes.items():
            run = start(task, tmp_path / name, traces, *mode, *APART, steps=3)
            assert run.finish() == 0, run.said()
    in_turns, bounded = (bits_of(tmp_path / name) for name in modes)
    assert in_turns.metrics == bounded.metrics and in_turns.rollouts == bounded.rollouts
    assert in_turns.states == bounded.states and len(in_turns.states) > 1


@pytest.mark.tier("full")
def test_deaths_lose_no_prompt_and_double_none(tmp_path: Path) -> None:
    """An engine that dies while a step is trained, the controller killed, a signal; then to the end."""
    (tmp_path / "task").mkdir()
    task, directory, steps = write_task(tmp_path / "task"), tmp_path / "run", 5
    with nothing_survives(tmp_path) as traces:
        run = start(task, directory, traces, *MODE, steps=steps)
        run.strike_at(doing(1, "score"), "engine-0.log")
        run.until(says(r"engine 0: started again, 1 of 3(.|\n)*engine 0: ready after"))
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
    assert max(most for _, most in staleness(rows)) <= BOUND
    drawn = prompts(directory, steps)
    assert len(set(drawn)) == len(drawn) == 8 * steps, "no prompt is lost, and none comes twice"
    assert rows[-1]["progress/epoch"] == 1.0
