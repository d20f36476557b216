"""An event loop whose clock jumps to the next timer, so that a simulation takes no time and repeats itself exactly."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualTime(asyncio.SelectorEventLoop):
    """The seconds of ``asyncio.sleep`` pass at once.  Nothing within may wait for another process."""

    def __init__(self) -> None:
        super().__init__()
        self._passed_s = 0.0
        selector: Any = self._selector  # type: ignore[attr-defined]  # of BaseSelectorEventLoop
        select = selector.select

        def jump(timeout: float | None) -> Any:
            self._passed_s += timeout or 0.0
            return select(0)

        selector.select = jump

    def time(self) -> float:
        """Seconds since the start."""
        return self._passed_s


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run`` in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        return runner.run(work)
