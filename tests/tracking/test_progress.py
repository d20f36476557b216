"""Progress of long work: lines where it is no terminal, a bar where it is; with a clock of the test's."""

from __future__ import annotations

import io

from rich.console import Console

from mcore_rl.tracking.progress import WorkProgress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_log_gets_a_line_now_and_then() -> None:
    written, clock = io.StringIO(), Clock()
    with WorkProgress("generating", 4, "tokens", Console(file=written, width=20), clock) as work:
        for seconds in (4.0, 8.0, 4.0, 4.0):  # lines are due at 10 s after the last
            clock.now += seconds
            work.advance(30)
    assert written.getvalue() == "generating: 2/4, 5 tokens/s, 12 s left\n"


def test_a_quick_work_writes_nothing_into_a_log() -> None:
    written = io.StringIO()
    with WorkProgress("grading", 2, "responses", Console(file=written), Clock()) as work:
        work.advance(1)
        work.advance(1)
    assert written.getvalue() == ""


def test_a_terminal_sees_a_bar_with_the_rate() -> None:
    written, clock = io.StringIO(), Clock()
    console = Console(file=written, force_terminal=True, width=120)
    with WorkProgress("generating", 3, "tokens", console, clock) as work:
        clock.now += 2.0
        work.advance(50)
        work._bar.refresh()
        assert work.rate == 25.0
    assert "generating" in written.getvalue() and "1/3" in written.getvalue() and "25 tokens/s" in written.getvalue()
