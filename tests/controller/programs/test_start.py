"""What is started at once ends at once: ``_together`` of ``mcore_rl.controller.lifecycle.start_processes``."""

from __future__ import annotations

import asyncio

import pytest

from mcore_rl.controller.lifecycle.start_processes import _together
from mcore_rl.ground.errors import RolloutError


class Starting:
    """What takes its time, and says whether it had ended."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.ended = False

    async def until_cancelled(self) -> None:
        try:
            self.begun.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)  # what it takes down again
            self.ended = True

    async def failing(self) -> None:
        await self.begun.wait()
        raise RolloutError("no such model")


async def _value(value: object) -> object:
    return value


def test_both_results_are_returned_in_order() -> None:
    assert asyncio.run(_together(_value(1), _value("two"), lambda _: None)) == (1, "two")


@pytest.mark.parametrize("slower", [0, 1])
def test_the_one_that_is_ready_first_is_told_of(slower: int) -> None:
    async def run() -> tuple[list[int], tuple[object, object]]:
        told = list[int]()
        may_end = asyncio.Event()

        async def waiting() -> str:
            await may_end.wait()
            return "slow"

        def ready(number: int) -> None:
            told.append(number)
            may_end.set()

        both = [_value("quick"), waiting()]
        results = await _together(*(both if slower else both[::-1]), ready)
        return told, results

    told, results = asyncio.run(run())
    assert told == [1 - slower] and results[slower] == "slow" and results[1 - slower] == "quick"


@pytest.mark.parametrize("failing_first", [True, False])
def test_the_failure_is_raised_once_the_other_has_ended(failing_first: bool) -> None:
    async def run() -> bool:
        other = Starting()
        told = list[int]()
        both = (other.failing(), other.until_cancelled())
        with pytest.raises(RolloutError, match="no such model"):
            await _together(*(both if failing_first else both[::-1]), told.append)
        assert told == []
        return other.ended

    assert asyncio.run(run())


def test_who_is_told_to_stop_ends_both_first() -> None:
    async def run() -> list[bool]:
        each = [Starting(), Starting()]
        starting = asyncio.ensure_future(
            _together(each[0].until_cancelled(), each[1].until_cancelled(), lambda _: None)
        )
        for one in each:
            await one.begun.wait()
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        return [one.ended for one in each]

    assert asyncio.run(run()) == [True, True]
