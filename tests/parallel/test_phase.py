"""Phases in a profiler's trace.  What an error and a death say of them is in test_launch.py."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from mcore_rl.parallel.phase import current_phase, mark_phases, phase


def test_phases_are_marked_while_somebody_wants_them() -> None:
    seen: list[str] = []

    @contextmanager
    def marker(words: str) -> Iterator[None]:
        seen.append(f"<{words}")
        yield
        seen.append(f"{words}>")

    with phase("before"):
        mark_phases(marker)
        with phase("step"), suppress(ZeroDivisionError), phase("forward", microbatch=3):
            assert current_phase() == "before > step > forward, microbatch 3"
            raise ZeroDivisionError
    with phase("open"):
        mark_phases(None)
    with phase("after"):
        pass
    assert seen == ["<step", "<forward, microbatch 3", "forward, microbatch 3>", "step>", "<open", "open>"]
    assert current_phase() == ""


def test_torch_s_profiler_shows_them_around_their_operators(tmp_path: Path) -> None:
    with torch.profiler.profile() as profiler:
        mark_phases(torch.profiler.record_function)
        with phase("forward", microbatch=3):
            torch.ones(4, 4) @ torch.ones(4, 4)
        mark_phases(None)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = {each["name"]: each for each in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    around, inside = events["forward, microbatch 3"], events["aten::mm"]
    assert around["ts"] <= inside["ts"] and inside["ts"] + inside["dur"] <= around["ts"] + around["dur"]
