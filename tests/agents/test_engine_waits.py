"""Idle engines by hand, with a clock of the test's."""

from __future__ import annotations

import pytest

from mcore_rl.agents import engine_waits
from mcore_rl.agents.engine_waits import EngineWaits


def test_only_time_in_which_all_wait_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(engine_waits.time, "monotonic", lambda: now[0])
    waits = EngineWaits()

    def after(seconds: float) -> None:
        now[0] += seconds

    after(1)  # nothing is asked for at all
    with waits.waiting():
        after(2)  # idle
        with waits.drawing():
            after(4)
            with waits.waiting():
                after(8)
        after(16)  # idle
        assert waits.take() == 18
        after(32)  # idle, and goes on
    after(64)
    with waits.drawing():
        after(128)
    assert waits.take() == 32 and waits.take() == 0
