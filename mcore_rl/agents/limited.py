"""Waits for work that others wrote, and no longer than its limit, whatever the work does when it is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

_left = set[asyncio.Future[Any]]()  # cancelled and still running: nothing else may hold them


async def limited(work: Coroutine[Any, Any, Any], limit_s: float) -> Any:
    """What ``work`` returns or raises; TimeoutError after ``limit_s`` seconds.

    Work that goes on although it is cancelled is left to itself: ``asyncio.wait_for`` would wait for it for ever.
    """
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait([task], timeout=limit_s)
    except asyncio.CancelledError:
        _leave(task)
        raise
    if not done:
        _leave(task)
        raise TimeoutError(f"took longer than {limit_s:g} s")
    if task.cancelled():  # by itself: nobody cancelled the caller
        raise RuntimeError("it cancelled itself")
    return task.result()


def _leave(task: asyncio.Future[Any]) -> None:
    _left.add(task)
    task.add_done_callback(_forget)
    task.cancel()


def _forget(task: asyncio.Future[Any]) -> None:
    _left.discard(task)
    if not task.cancelled():
        task.exception()  # read, so that asyncio does not log it
