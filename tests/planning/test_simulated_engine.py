"""An engine, step by step: sums by a loop are the oracle of the closed forms."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from mcore_rl.planning.simulated_engine import EngineCosts, Response, SimulatedEngine

COSTS = EngineCosts(
    fixed_s=(1.0,) * 9, stream_s=tuple(2.0 + 0.1 * r for r in range(9)), token_s=0.01, product_s=0.5, prefill_s=0.001
)


def looped(costs: EngineCosts, running: int, held: float, steps: int) -> float:
    seconds = 0.0
    for _ in range(steps):
        reading = costs.stream_s[running] + costs.token_s * held
        seconds += costs.fixed_s[running] + max(reading, costs.product_s * running)
        held += running
    return seconds


@pytest.mark.parametrize("running", [1, 3, 8])
@pytest.mark.parametrize("held", [0, 10, 95.0, 130, 1_000])
@pytest.mark.parametrize("product_s", [0.0, 0.5, 3.0])
def test_many_steps_cost_what_each_costs(running: int, held: float, product_s: float) -> None:
    costs = replace(COSTS, product_s=product_s)
    for steps in (0, 1, 2, 50):
        assert costs.decode_s(running, held, steps) == pytest.approx(looped(costs, running, held, steps))
    free = replace(costs, token_s=0.0)
    assert free.decode_s(running, held, 7) == pytest.approx(looped(free, running, held, 7))


def drained(engine: SimulatedEngine, clocks: list[float] | None = None) -> list[tuple[int, float]]:
    """(length, time) of what becomes whole; interrupted at ``clocks``."""
    whole, stops = [], sorted(clocks or [])
    _, end = engine.resume()
    while end is not None:
        time = stops.pop(0) if stops and stops[0] < end else end
        whole += [(response.length, engine.clock) for response in engine.advance(time)]
        _, end = engine.resume()
    return whole


def filled(costs: EngineCosts, lengths: list[int], prompt: int = 10) -> SimulatedEngine:
    engine = SimulatedEngine(costs)
    for index, length in enumerate(lengths):
        engine.submit(Response(group=0, length=length, prompt=prompt, prefilled=index > 0))
    return engine


def test_a_makespan_by_hand() -> None:
    """Three responses of one prompt of 10 tokens: read once; 2 steps of three, 3 of two, 5 of one."""
    ends = drained(filled(COSTS, [2, 5, 10]))
    prefill = 10 * COSTS.prefill_s
    first = prefill + looped(COSTS, 3, 30, 2)
    second = first + looped(COSTS, 2, 24, 3)
    third = second + looped(COSTS, 1, 15, 5)
    assert [length for length, _ in ends] == [2, 5, 10]
    assert [time for _, time in ends] == pytest.approx([first, second, third])


def test_no_more_run_than_may() -> None:
    costs = replace(COSTS, fixed_s=(1.0,) * 3, stream_s=(0.0,) * 3, token_s=0.0, product_s=0.0, prefill_s=0.0)
    ends = drained(filled(costs, [4, 4, 4, 4, 4]))
    assert [time for _, time in ends] == [4, 4, 8, 8, 12]


def test_a_look_changes_nothing() -> None:
    """Interruptions fall into steps; what was computed and when it ends stay."""
    random = Random(5)
    lengths = [random.randint(1, 60) for _ in range(30)]
    plain, looked = filled(COSTS, lengths), filled(COSTS, lengths)
    looks = [random.uniform(0, 400) for _ in range(200)]
    seen, expected = drained(looked, looks), drained(plain)
    assert [length for length, _ in seen] == [length for length, _ in expected]
    assert [time for _, time in seen] == pytest.approx([time for _, time in expected])
    assert looked.busy_s == pytest.approx(plain.busy_s) == pytest.approx(plain.clock)
    assert looked.idle and looked.outstanding == 0


def test_a_full_cache_makes_the_last_wait_and_loses_nothing() -> None:
    """Two of 10 + 20 tokens, room for 45: the second leaves after 12 steps, and is read as far as was taken."""
    costs = EngineCosts(
        fixed_s=(1.0,) * 9, stream_s=(0.0,) * 9, token_s=0.0, product_s=0.0, prefill_s=0.01, capacity=45
    )  # fmt: skip
    engine = filled(costs, [20, 20])
    ends = drained(engine)
    assert engine.num_preemptions == 1
    first = 10 * 0.01 + 20  # one prompt
    # Of the second's 22 tokens, the first took 8 blocks until its end.
    assert [time for _, time in ends] == pytest.approx([first, first + 8 * 0.01 + 8])
    many = filled(replace(costs, capacity=80.0), [20] * 20)
    assert len(drained(many)) == 20 and many.num_preemptions > 0
    assert drained(filled(replace(costs, capacity=5.0), [20]))[0][1] == pytest.approx(first), "alone it always fits"


def test_new_weights_make_the_cache_be_read_again() -> None:
    engine = filled(replace(COSTS, slot=3.0), [20, 20])
    engine.resume()
    engine.advance(20.0)
    clock, made = engine.clock, engine._step
    engine.recompute(clock + 7)
    assert engine.clock == pytest.approx(clock + 7 + COSTS.prefill_s * 2 * (10 + made))


def test_blocks_of_before_an_update_cannot_be_read() -> None:
    """As where the cache is full; the weights change after 15 steps, so that all 22 tokens of the second are read."""
    costs = EngineCosts(
        fixed_s=(1.0,) * 9, stream_s=(0.0,) * 9, token_s=0.0, product_s=0.0, prefill_s=0.01, capacity=45
    )  # fmt: skip
    engine = filled(costs, [20, 20])
    _, end = engine.resume()
    assert end is not None and end == pytest.approx(0.1 + 12) and engine.advance(end) == []
    engine.resume()
    engine.advance(0.1 + 15)
    engine.recompute(engine.clock)
    ends = [time for _, time in drained(engine)]
    assert ends == pytest.approx([0.1 + 20 + 25 * 0.01, 0.1 + 20 + 25 * 0.01 + 22 * 0.01 + 8])
