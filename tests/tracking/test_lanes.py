"""Lanes against the order of events by hand, and against a clock of their own."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest

from mcore_rl.tracking.clock import PhaseSpan
from mcore_rl.tracking.lanes import (
    GAP_S,
    MAX_LANES,
    MAX_SPANS,
    Lane,
    LanesFile,
    LaneSpan,
    State,
    StepLanes,
    fewer,
    idle_share,
    read_lanes,
    trainer_lane,
    trainer_state,
)
from mcore_rl.tracking.metrics import PHASES


class Time:
    """A clock that goes on when it is told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def lane() -> tuple[Lane, Time]:
    clock = Time()
    return Lane("engine 0", clock), clock


def test_a_lane_shows_the_state_that_stands_before_the_others() -> None:
    engine, clock = lane()
    seen = []

    def wait(seconds: float) -> None:
        seen.append((engine.state, seconds))
        clock.now += seconds

    engine.begin(State.drawing, 1)
    wait(1.0)
    engine.begin(State.drawing, 2)  # another call
    engine.end(State.drawing, 1)
    wait(2.0)
    with engine.within(State.paused):
        wait(0.5)
        with engine.within(State.updating):
            wait(0.25)
        wait(0.125)
    wait(1.0)
    engine.end(State.drawing, 2)
    engine.end(State.drawing, 2)
    wait(3.0)
    assert [state for state, _ in seen] == [
        State.drawing, State.drawing, State.paused, State.updating, State.paused, State.drawing, None,
    ]  # fmt: skip
    assert engine.take(100.0, clock.now) == (
        LaneSpan(State.drawing, 0.0, 3.0), LaneSpan(State.paused, 3.0, 3.5), LaneSpan(State.updating, 3.5, 3.75),
        LaneSpan(State.paused, 3.75, 3.875), LaneSpan(State.drawing, 3.875, 4.875),
    )  # fmt: skip
    assert engine.seconds == {State.drawing: 4.0, State.paused: 0.625, State.updating: 0.25}
    assert idle_share(engine.seconds, clock.now - 100.0) == pytest.approx(3.0 / 7.875)


def test_a_state_goes_on_in_the_next_step() -> None:
    engine, clock = lane()
    engine.begin(State.drawing, 1)
    clock.now += 2.0
    assert engine.take(100.0, 102.0) == (LaneSpan(State.drawing, 0.0, 2.0),)
    clock.now += 0.5
    engine.end(State.drawing, 1)
    clock.now += 0.5
    assert engine.take(102.0, 103.0) == (LaneSpan(State.drawing, 0.0, 0.5),)
    assert engine.seconds == {State.drawing: 0.5}
    assert engine.take(103.0, 104.0) == () and engine.seconds == {}


def test_what_was_before_a_run_is_not_of_its_first_step() -> None:
    engine, clock = lane()
    with engine.within(State.drawing):
        clock.now += 50.0
    clock.now += 1.0
    engine.take(clock.now, clock.now)
    with engine.within(State.drawing):
        clock.now += 2.0
    assert engine.take(151.0, 153.0) == (LaneSpan(State.drawing, 0.0, 2.0),)
    assert engine.seconds == {State.drawing: 2.0}


def test_a_restart_forgets_what_the_dead_process_had_begun() -> None:
    engine, clock = lane()
    engine.begin(State.drawing, "call")
    engine.begin(State.paused, "update")
    clock.now += 1.0
    engine.clear()
    assert engine.state is None
    with engine.within(State.restarting):
        clock.now += 2.0
        engine.end(State.drawing, "call")  # who waited for the dead process gives up only now
        assert engine.state is State.restarting
    assert engine.state is None, "neither the call nor the update holds on"
    assert engine.take(100.0, 103.0) == (LaneSpan(State.paused, 0.0, 1.0), LaneSpan(State.restarting, 1.0, 3.0))
    assert idle_share(engine.seconds, 3.0) == pytest.approx(2 / 3), "one that restarts does no work"


def test_a_million_changes_are_few_spans_and_exact_seconds() -> None:
    engine, clock = lane()
    draw, drawn = random.Random(0), 0.0
    for _ in range(100_000):
        engine.begin(State.drawing, 1)
        seconds = draw.random() * 0.01
        clock.now += seconds
        drawn += seconds
        engine.end(State.drawing, 1)
        clock.now += draw.random() * 0.01
        assert len(engine._spans) <= 2 * MAX_SPANS
    spans = engine.take(100.0, clock.now)
    assert engine.seconds[State.drawing] == pytest.approx(drawn)
    assert spans[0].start == 0.0 and all(one.end <= other.start for one, other in pairwise(spans))
    assert sum(span.end - span.start for span in spans) == pytest.approx(clock.now - 100.0, rel=0.01), "as one sees it"


def test_what_is_written_keeps_the_long_spans() -> None:
    many = [LaneSpan(State.drawing, k, k + 0.5) for k in range(1000)]
    many[400] = LaneSpan(State.updating, 400.0, 460.0)
    many = [each for each in many if each.state is State.updating or not 400 <= each.start < 460]
    kept, _ = fewer(many, MAX_SPANS)
    assert len(kept) <= MAX_SPANS
    assert LaneSpan(State.updating, 400.0, 460.0) in kept
    few = [LaneSpan(State.drawing, 0.0, 1.0), LaneSpan(State.drawing, 1.0 + GAP_S / 2, 2.0)]
    assert fewer(few, MAX_SPANS)[0] == [LaneSpan(State.drawing, 0.0, 2.0)]


def test_every_phase_in_which_the_trainer_works_is_a_state() -> None:
    waits = {"generate", "score", "validate"}
    assert {phase for phase in PHASES if trainer_state(phase) is None} == waits
    assert trainer_state("verifier_scores") is trainer_state("update_verifier") is State.training
    assert trainer_state("step") is trainer_state("update_actor/send") is None, "no phases"
    spans = [PhaseSpan("generate", 0, 2), PhaseSpan("update_actor", 2, 5), PhaseSpan("drawing", 1, 4),
             PhaseSpan("sync", 5, 6), PhaseSpan("validate/generate", 6, 7)]  # fmt: skip
    assert trainer_lane(spans) == (LaneSpan(State.training, 2, 5), LaneSpan(State.updating, 5, 6))


def test_lanes_read_back_and_a_file_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "lanes.jsonl"
    spans = tuple(LaneSpan(State.drawing, 2.0 * k, 2.0 * k + 1) for k in range(3))
    lanes = StepLanes(1.7e9, 7.5, {"trainer": (), "engine 0": spans})
    flood = [LaneSpan(list(State)[k % 3], k / 10, (k + 1) / 10) for k in range(10_000)]
    file = LanesFile(path, -1)
    file.write(1, lanes)
    file.write(2, StepLanes(1.7e9, 1e3, {f"engine {k}": flood for k in range(1000)}))
    file.close()
    read = read_lanes(path)
    assert read[1] == lanes
    assert len(read[2].lanes) == MAX_LANES and max(map(len, read[2].lanes.values())) <= MAX_SPANS
    assert path.stat().st_size < 2 * MAX_LANES * MAX_SPANS * 40
    LanesFile(path, 1).close()
    assert list(read_lanes(path)) == [1] and read_lanes(tmp_path / "none") == {}


@pytest.mark.parametrize("bad", [["drawing", 2, 1], ["drawing", -1, 1], ["asleep", 0, 1], ["drawing", "0", 1], 7, None])
def test_what_is_no_span_is_left_out(tmp_path: Path, bad: object) -> None:
    row = {"step": 1, "at": 0, "seconds": 2, "lanes": {"engine 0": [bad, ["drawing", 0, 1]], "engine 1": bad}}
    path = tmp_path / "lanes.jsonl"
    path.write_text(json.dumps(row) + '\n{"step": 2, "lanes": 7}\n{"step": 3')
    assert read_lanes(path) == {1: StepLanes(0, 2, {"engine 0": (LaneSpan(State.drawing, 0, 1),), "engine 1": ()})}
