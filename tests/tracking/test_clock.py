from __future__ import annotations

import asyncio

import pytest

from mcore_rl.tracking.clock import Clock, PhaseSpan
from mcore_rl.tracking.metrics import metric_of


class Hand:
    """A clock that is turned by hand."""

    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at

    def turn(self, seconds: float) -> None:
        self.at += seconds


def test_phases_and_what_is_left_of_the_step() -> None:
    hand = Hand()
    clock = Clock(hand)
    hand.turn(1)
    with clock("generate"):
        hand.turn(4)
    with clock("update_actor"):
        hand.turn(2)
    hand.turn(0.5)
    with clock("generate"):  # once more, as for prompts that were replaced
        hand.turn(0.5)
    seconds = clock.step()
    assert seconds == {
        "time/generate": 4.5,
        "time/update_actor": 2.0,
        "time/step": 8.0,
        "perf/overhead_share": pytest.approx(1.5 / 8, abs=1e-15),
    }
    assert all(metric_of(key) for key in seconds)


def test_spans_say_when_a_phase_was_open() -> None:
    hand = Hand()
    clock = Clock(hand)
    hand.turn(1)
    with clock("validate"):
        hand.turn(1)
        with clock("generate"):
            hand.turn(2)
    with clock("sync"):
        hand.turn(0.5)
    clock.step()
    assert clock.spans == (
        PhaseSpan("validate", 1.0, 4.0), PhaseSpan("validate/generate", 2.0, 4.0), PhaseSpan("sync", 4.0, 4.5)
    )  # fmt: skip
    clock.step()
    assert clock.spans == ()


def test_a_step_starts_where_the_last_one_ended() -> None:
    hand = Hand()
    clock = Clock(hand)
    with clock("save"):
        hand.turn(3)
    clock.step()
    hand.turn(2)
    assert clock.step() == {"time/step": 2.0, "perf/overhead_share": 1.0}


def test_what_is_inside_a_phase_is_a_part_of_it_and_counted_once() -> None:
    hand = Hand()
    clock = Clock(hand)
    with clock("validate"):
        hand.turn(1)
        with clock("generate"):
            hand.turn(5)
            with clock("score"):
                hand.turn(2)
    seconds = clock.step()
    assert seconds["time/validate"] == 8
    assert seconds["time/validate/generate"] == 7
    assert seconds["time/validate/generate/score"] == 2
    assert "time/generate" not in seconds
    assert seconds["perf/overhead_share"] == 0


def test_overlapping_tasks_are_counted_once() -> None:
    """generate 0..6, score 4..9 in another task: 9 of 10 seconds are accounted for, not 11."""
    hand = Hand()
    clock = Clock(hand)

    async def both() -> None:
        scoring, over = asyncio.Event(), asyncio.Event()

        async def score() -> None:
            await scoring.wait()
            with clock("score"):
                over.set()
                await generated.wait()
                hand.turn(3)

        generated = asyncio.Event()
        task = asyncio.create_task(score())
        with clock("generate"):
            hand.turn(4)
            scoring.set()
            await over.wait()
            hand.turn(2)
        generated.set()
        await task

    asyncio.run(both())
    hand.turn(1)
    seconds = clock.step()
    assert (seconds["time/generate"], seconds["time/generate/score"], seconds["time/step"]) == (6, 5, 10)
    assert seconds["perf/overhead_share"] == pytest.approx(0.1, abs=1e-15)


def test_the_same_phase_of_several_tasks_is_one_phase() -> None:
    hand = Hand()
    clock = Clock(hand)
    with clock("score"), clock("score"):
        hand.turn(2)
    seconds = clock.step()
    assert seconds["time/score"] == 2
    assert "time/score/score" not in seconds


def test_an_error_ends_the_phase() -> None:
    hand = Hand()
    clock = Clock(hand)
    with pytest.raises(ZeroDivisionError), clock("generate"):
        hand.turn(1 / 0)
    hand.turn(1)
    assert clock.step() == {"time/generate": 0, "time/step": 1, "perf/overhead_share": 1}


def test_unknown_phases_and_open_ones_are_our_mistakes() -> None:
    clock = Clock()
    with pytest.raises(AssertionError, match="no such metric"), clock("lunch"):
        pass
    with pytest.raises(AssertionError, match="generate"), clock("generate"):
        clock.step()


def test_what_goes_on_beside_the_phases_is_shown_and_not_counted() -> None:
    hand = Hand()
    clock = Clock(hand)
    with clock.beside("next step"):
        hand.turn(1)
        with clock("update_actor"):
            hand.turn(2)
    assert clock.step() == {"time/update_actor": 2, "time/step": 3, "perf/overhead_share": pytest.approx(1 / 3)}
    assert [(span.phase, span.start, span.end) for span in clock.spans] == [("next step", 0, 3), ("update_actor", 1, 3)]
