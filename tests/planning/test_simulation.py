"""The simulation against closed forms, and what must hold of any: bounds, order, and that more is not slower."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from mcore_rl.planning.lengths import Lognormal
from mcore_rl.planning.simulated_engine import EngineCosts
from mcore_rl.planning.simulation import (
    ONE_STEP_OFF,
    SYNC_COLOCATED,
    SYNC_SEPARATE,
    Simulation,
    TrainerCosts,
    Workload,
    asynchronous,
    simulate,
)

# A step of one second, whatever runs: durations are lengths.
PLAIN = EngineCosts(fixed_s=(1.0,) * 65, stream_s=(0.0,) * 65, token_s=0.0, product_s=0.0, prefill_s=0.0)
CONSTANT = Workload(groups=8, samples=4, prompt=10, lengths=Lognormal(100, 100, 0.0))
SPREAD = Workload(groups=16, samples=4, prompt=10, lengths=Lognormal(250, 1_000))
REAL = EngineCosts(
    fixed_s=(0.01,) * 65, stream_s=tuple(0.02 + 1e-4 * r for r in range(65)), token_s=1e-6, product_s=4e-4,
    prefill_s=2e-5, capacity=20_000,
)  # fmt: skip
TRAINER = TrainerCosts(fixed_s=1.0, token_s=1e-3, publish_s=0.5)
MODES = (SYNC_COLOCATED, SYNC_SEPARATE, ONE_STEP_OFF, asynchronous(0), asynchronous(1), asynchronous(4))


def trained_in(seconds: float, publish_s: float = 0.0) -> TrainerCosts:
    return TrainerCosts(fixed_s=seconds, token_s=0.0, publish_s=publish_s)


@pytest.mark.parametrize("mode", [SYNC_COLOCATED, SYNC_SEPARATE, asynchronous(0)])
def test_without_overlap_a_step_is_the_sum(mode: object) -> None:
    """All at once: 100 steps of drawing, 40 s of training, 5 of publishing.  Turns of 64 at most: twice 100."""
    one = simulate(mode, CONSTANT, PLAIN, 1, trained_in(40, 5))  # type: ignore[arg-type]
    assert one.step_s == pytest.approx(100 + 40 + 5)
    assert (one.drawing, one.training, one.publishing) == pytest.approx((100 / 145, 40 / 145, 5 / 145))
    reading = simulate(mode, CONSTANT, replace(PLAIN, prefill_s=0.01), 1, trained_in(40, 5))  # type: ignore[arg-type]
    assert reading.step_s == pytest.approx(one.step_s + 8 * 10 * 0.01), "a prompt is read once a group"
    turns = simulate(mode, replace(CONSTANT, groups=32), PLAIN, 1, trained_in(40, 5))  # type: ignore[arg-type]
    assert turns.step_s == pytest.approx(2 * 100 + 40 + 5)
    assert one.samples_per_s == pytest.approx(32 / 145) and one.staleness_max == 0


@pytest.mark.parametrize("training", [30.0, 100.0, 170.0])
def test_one_step_off_takes_the_longer_of_both(training: float) -> None:
    one = simulate(ONE_STEP_OFF, CONSTANT, PLAIN, 1, trained_in(training, 5))
    assert one.step_s == pytest.approx(max(100, training) + 5)
    assert (one.staleness_mean, one.staleness_max) == (1, 1)


def test_with_engines_without_end_training_is_all() -> None:
    """A response of 100 s is whole before it is needed; what publishing takes from the engines, none waits for."""
    fast = simulate(asynchronous(4), CONSTANT, PLAIN, 64, trained_in(60, 1))
    assert fast.step_s == pytest.approx(61) and fast.trainer_idle == pytest.approx(0, abs=1e-9)


def test_where_the_trainer_takes_nothing_drawing_is_all() -> None:
    """64 run together for 100 s, and a batch is 32: with nothing between them, a batch every 50 s."""
    slow = simulate(asynchronous(3), CONSTANT, PLAIN, 1, trained_in(1e-6), steps=16)
    assert slow.step_s == pytest.approx(50, rel=0.01) and slow.engines_idle < 0.02


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("num_engines", [1, 5])
def test_every_group_is_trained_once_within_the_bound(mode: object, num_engines: int) -> None:
    result = simulate(mode, SPREAD, REAL, num_engines, TRAINER, steps=12)  # type: ignore[arg-type]
    bound = mode.max_staleness  # type: ignore[attr-defined]
    assert len(set(result.trained)) == len(result.trained) and result.staleness_max <= bound
    for version, number in enumerate(result.trained[::16]):
        assert number < (version + 1 + bound) * 16, "admission"
    assert 0 <= result.engines_idle <= 1 and 0 <= result.trainer_idle <= 1
    again = simulate(mode, SPREAD, REAL, num_engines, TRAINER, steps=12)  # type: ignore[arg-type]
    assert again == result
    assert simulate(mode, SPREAD, REAL, num_engines, TRAINER, steps=12, seed=1) != result  # type: ignore[arg-type]


def speeds(mode: object, engines: tuple[int, ...]) -> list[Simulation]:
    return [simulate(mode, SPREAD, REAL, count, TRAINER, steps=20) for count in engines]  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_more_engines_are_not_slower(mode: object) -> None:
    for few, more in pairwise(speeds(mode, (1, 2, 4, 8))):
        assert more.step_s <= few.step_s * 1.02


def test_asynchronous_is_not_slower_than_sync_on_the_same_devices() -> None:
    for engines in (1, 2, 8):
        steps = [simulate(mode, SPREAD, REAL, engines, TRAINER, steps=20).step_s for mode in MODES[1:]]
        sync, one_step_off, none, one, four = steps
        assert none == pytest.approx(sync), "a bound of 0 is sync"
        assert one_step_off <= sync * 1.02 and one <= sync * 1.02 and four <= one * 1.02


def test_a_long_response_is_waited_for_and_not_lost() -> None:
    """The trainer is so fast that the bound decides: every group is trained in its turn, none beyond the bound."""
    result = simulate(asynchronous(2), SPREAD, REAL, 8, trained_in(0.01), steps=30)
    assert result.staleness_max == 2 and result.trainer_idle > 0.5


def test_an_update_without_partial_responses_waits_for_them() -> None:
    waits = replace(asynchronous(4), in_flight=False)
    assert (
        simulate(waits, SPREAD, REAL, 2, TRAINER).step_s
        > 1.05 * simulate(asynchronous(4), SPREAD, REAL, 2, TRAINER).step_s
    )


def test_on_shared_devices_nobody_draws_while_the_trainer_trains() -> None:
    result = simulate(replace(asynchronous(2), shared=True), SPREAD, REAL, 2, trained_in(20, 5))
    assert result.drawing + result.training + result.publishing <= 1 + 1e-9


def test_new_weights_cost_the_engines_what_they_read_again() -> None:
    """Two batches end at once and are trained: after either update the 64 that have just begun are read again."""
    plain, reading = (
        simulate(asynchronous(3), CONSTANT, replace(PLAIN, prefill_s=each), 1, trained_in(1e-6), steps=16).step_s
        for each in (0.0, 1e-3)
    )
    prompts = 8 * 10 * 1e-3
    assert reading == pytest.approx(plain + prompts + 64 * 10e-3)
