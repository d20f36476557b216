"""What a signal does to work that may be given up and to work that may not; the whole of it is in tests/crash."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from mcore_rl.controller.step.preemption import Preempted, Preemption


async def said(leaving: Preemption) -> str:
    await asyncio.sleep(0)
    return "done"


def test_work_is_done_unless_it_was_asked_to_leave() -> None:
    async def main() -> None:
        leaving = Preemption()
        leaving.raise_if_asked()
        assert await leaving.cancel_if_asked(said(leaving)) == "done"

    asyncio.run(main())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_gives_work_up_and_lets_it_clean_up(number: signal.Signals) -> None:
    cleaned = []

    async def long() -> None:
        try:
            os.kill(os.getpid(), number)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            cleaned.append(True)

    async def main() -> None:
        leaving = Preemption()
        with leaving.listening():
            with pytest.raises(Preempted):
                await leaving.cancel_if_asked(long())
            assert cleaned and leaving.asked_by == number.name
            with pytest.raises(Preempted):
                await leaving.cancel_if_asked(said(leaving))
            with pytest.raises(Preempted):
                leaving.raise_if_asked()

    asyncio.run(main())


def test_an_error_of_the_work_is_raised() -> None:
    async def fails() -> None:
        raise ValueError("no such expert")

    async def main() -> None:
        with pytest.raises(ValueError, match="no such expert"):
            await Preemption().cancel_if_asked(fails())

    asyncio.run(main())


def test_a_second_signal_ends_what_is_under_way() -> None:
    async def main() -> None:
        leaving = Preemption()
        with leaving.listening():
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.05)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(60)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())


def test_outside_signals_do_what_they_did_before() -> None:
    before = signal.getsignal(signal.SIGTERM)

    async def main() -> None:
        with Preemption().listening():
            assert signal.getsignal(signal.SIGTERM) != before

    asyncio.run(main())
    assert signal.getsignal(signal.SIGTERM) == before
