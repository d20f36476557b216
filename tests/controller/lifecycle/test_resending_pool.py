"""Samples that a death took are drawn again, once, with the weights that the engines had.  Real deaths are in
tests/crash."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from mcore_rl.config.trainer import Placement
from mcore_rl.controller.lifecycle.device_sharing import DROP_WEIGHTS, DeviceSharing
from mcore_rl.controller.lifecycle.resending_pool import QUIET_S, ResendingPool
from mcore_rl.ground.errors import DeadEngineError
from mcore_rl.rollout.protocol import Pause, Prompt, Request, Sampling
from tests.support.turns import OFFLOADED, Turns, turns

SAMPLING = Sampling(max_tokens=4)
VERSION = 7


class Finished:
    """What is read of a sample."""

    def __init__(self, request: Request) -> None:
        self.prompt_id, self.index = request.key


class Pool:
    """Dies after ``dies_after`` samples in all and draws again after a restart; one death ends all calls."""

    def __init__(self, both: Turns, dies_after: list[int]) -> None:
        self.both, self.dies_after, self.drawn = both, dies_after, 0
        self.asked: list[int] = []

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Any]:
        self.asked.append(len(requests))
        for request in requests:
            await asyncio.sleep(0)
            deaths = self.both.restarter.num_restarts
            if deaths < len(self.dies_after) and self.drawn >= self.dies_after[deaths]:
                raise DeadEngineError("engine 1 died")
            self.drawn += 1
            yield Finished(request)


def resending(dies_after: list[int], limit: int = 9) -> tuple[ResendingPool, Pool, Turns]:
    """A pool whose engines hold version ``VERSION``."""
    both = turns(limit=limit)
    asyncio.run(both.rollout(VERSION))
    both.log.clear()
    pool: Any = Pool(both, dies_after)
    return ResendingPool(pool, both.restarter, both.devices, both.weights), pool, both


def requests(name: str, count: int) -> list[Request]:
    return [Request(prompt=Prompt(id=name, tokens=(1,)), index=index) for index in range(count)]


async def keys(samples: ResendingPool, wanted: list[Request]) -> list[tuple[str, int]]:
    return [(each.prompt_id, each.index) async for each in samples.generate(wanted, SAMPLING)]


def test_only_what_was_not_drawn_is_drawn_again() -> None:
    samples, pool, both = resending([3, 5])
    wanted = requests("a", 8)
    assert asyncio.run(keys(samples, wanted)) == [each.key for each in wanted]
    assert pool.asked == [8, 5, 3] and both.restarter.num_restarts == 2


def test_all_engines_get_the_weights_that_they_had_before_anything_more_is_drawn() -> None:
    samples, _, both = resending([3])
    asyncio.run(keys(samples, requests("a", 8)))
    assert both.log == [
        "restart", ("sleep", DROP_WEIGHTS), "wake weights", "rejoin", ("update", VERSION), OFFLOADED, "wake kv_cache"
    ]  # fmt: skip


def test_one_death_that_ends_two_calls_is_answered_once() -> None:
    samples, pool, both = resending([5])

    async def run() -> list[list[tuple[str, int]]]:
        return await asyncio.gather(keys(samples, requests("a", 6)), keys(samples, requests("b", 6)))

    by_call = asyncio.run(run())
    assert [len(set(each)) for each in by_call] == [6, 6] == [len(each) for each in by_call]
    assert both.restarter.num_restarts == 1 and len(pool.asked) == 4


def test_a_call_that_begins_during_a_recovery_waits_for_it() -> None:
    """As an agent's next turn, whose tool ran while an engine died."""
    samples, pool, both = resending([3])
    asked_at = list[int]()
    send_again = both.devices.send_again

    async def run() -> list[tuple[str, int]]:
        turn: list[asyncio.Task[list[tuple[str, int]]]] = []

        async def slowly(version: int) -> None:
            turn.append(asyncio.create_task(keys(samples, requests("turn", 1))))
            await asyncio.sleep(0.05)
            asked_at.append(len(pool.asked))
            await send_again(version)

        both.devices.send_again = slowly  # type: ignore[method-assign]
        await keys(samples, requests("a", 8))
        return await turn[0]

    assert asyncio.run(run()) == [("turn", 0)]
    assert asked_at == [1], "nothing is asked of engines before they have their weights"


def turn_of_the_trainer(samples: ResendingPool, pool: Pool, both: Turns, publish: Callable[[], None]) -> list[str]:
    """What a death leads to while the trainer trains; ``publish`` is called before it publishes version 8."""
    both.devices = samples._devices = DeviceSharing(
        Placement.separate, both.actor, both.engines, both.weights, both.restarter
    )

    async def run() -> None:
        await both.devices.to_trainer()
        drawing = asyncio.create_task(keys(samples, requests("a", 8)))
        await asyncio.sleep(3 * QUIET_S)
        assert not drawing.done() and not both.log and pool.asked == [8], "half-trained weights are of no version"
        publish()
        await both.devices.to_engines(VERSION + 1)
        assert len(await asyncio.wait_for(drawing, 5)) == 8

    asyncio.run(run())
    return both.log


def test_a_death_while_the_trainer_trains_waits_for_what_it_publishes() -> None:
    samples, pool, both = resending([3])
    log = turn_of_the_trainer(samples, pool, both, lambda: None)
    assert log == [("update", VERSION + 1), "restart", "rejoin", ("update", VERSION + 1)]


def test_a_death_that_the_publishing_met_is_no_second_restart() -> None:
    samples, pool, both = resending([3])

    def publish() -> None:
        both.engines.dies_in = "update"

    log = turn_of_the_trainer(samples, pool, both, publish)
    assert log == ["death in update", "restart", "rejoin", ("update", VERSION + 1)]


def test_a_step_is_handed_out_once_a_recovery_has_ended() -> None:
    samples, _, both = resending([3])
    update = both.weights.update

    async def run() -> None:
        begun = asyncio.Event()

        async def slowly(version: int, pause: Pause) -> None:
            begun.set()
            await asyncio.sleep(0.05)
            await update(version, pause)

        both.weights.update = slowly  # type: ignore[method-assign]
        drawing = asyncio.create_task(keys(samples, requests("a", 8)))
        await begun.wait()
        await both.devices.to_trainer()
        assert ("update", VERSION) in both.log
        await drawing

    asyncio.run(run())


def test_too_many_deaths_are_raised() -> None:
    samples, _, both = resending([1, 2, 3], limit=2)
    with pytest.raises(DeadEngineError, match="engine 1 died"):
        asyncio.run(keys(samples, requests("a", 8)))
    assert both.restarter.num_restarts == 2
