"""Work of others takes no longer than its limit, even if it will not be cancelled."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from typing import Any

import pytest

from mcore_rl.agents import limited as limited_work
from mcore_rl.agents.limited import limited
from tests.support.awaited import awaited


async def stubborn(seconds: float) -> str:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            continue
    raise OSError("late")


async def at_once(value: Any) -> Any:
    if isinstance(value, BaseException):
        raise value
    return value


@awaited
async def test_results_and_errors_pass_through() -> None:
    assert await limited(at_once(3), 1.0) == 3
    with pytest.raises(OSError, match="no"):
        await limited(at_once(OSError("no")), 1.0)
    with pytest.raises(RuntimeError, match="cancelled itself"):
        await limited(at_once(asyncio.CancelledError()), 1.0)


@awaited
async def test_work_that_swallows_its_cancellation_is_left(caplog: pytest.LogCaptureFixture) -> None:
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"longer than 0\.1 s"):
        await limited(stubborn(3.0), 0.1)
    waiting = asyncio.create_task(limited(stubborn(3.0), 9.0))
    await asyncio.sleep(0.05)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert time.monotonic() - start < 2.5
    with caplog.at_level(logging.ERROR, logger="asyncio"):
        while limited_work._left:
            await asyncio.sleep(0.05)
        gc.collect()
    assert not caplog.records, "nobody is told what it raised later"
