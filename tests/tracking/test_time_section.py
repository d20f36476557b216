"""Bars of a timeline are read back with its own axis."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mcore_rl.tracking.clock import PhaseSpan
from mcore_rl.tracking.lanes import State
from mcore_rl.tracking.metrics import PHASES
from mcore_rl.tracking.page import NEUTRAL
from mcore_rl.tracking.run_files import read_run
from mcore_rl.tracking.time_section import COLOURS, LABELS, NAMES, PHASE_COLOURS, time_section, timeline
from tests.tracking.pages import words
from tests.tracking.recorded_run import record

SPANS = (
    PhaseSpan("generate", 0.5, 4.5), PhaseSpan("score", 3.0, 5.0), PhaseSpan("update_actor", 5.0, 8.0),
    PhaseSpan("validate", 8.0, 9.5), PhaseSpan("validate/generate", 8.0, 9.0), PhaseSpan("score", 9.5, 10.0),
)  # fmt: skip


def bars(figure: ElementTree.Element) -> list[tuple[float, float]]:
    """(start, end) of each bar in seconds, from its place and the ticks' labels."""
    ticks = [each for each in figure.iter("text") if each.get("class") == "x"]
    (x0, v0), (x1, v1) = (
        (float(each.get("x") or ""), float((each.text or "").removesuffix(" s"))) for each in (ticks[0], ticks[-1])
    )
    slope = (v1 - v0) / (x1 - x0)
    edges = [(float(bar.get("x") or ""), float(bar.get("width") or "")) for bar in figure.iter("rect")]
    return [(v0 + (x - x0) * slope, v0 + (x + wide - x0) * slope) for x, wide in edges]


def test_bars_are_where_their_phases_were_open() -> None:
    figure = ElementTree.fromstring(timeline("Step 7", "the newest", SPANS, 10.0))
    drawn = sorted(bars(figure))
    expected = sorted((span.start, span.end) for span in SPANS)
    assert [end for pair in drawn for end in pair] == pytest.approx([e for pair in expected for e in pair], abs=0.05)
    labels = [each.text for each in figure.iter("text") if each.get("class") is None]
    assert labels == ["drawing", "grading", "training", "validating", "drawing"], "a part stands below its phase"
    amounts = [each.text for each in figure.iter("text") if each.get("class") == "y"]
    assert amounts == ["4 s", "2.5 s", "3 s", "1.5 s", "1 s"]


def test_the_report_shows_the_newest_the_middle_and_the_longest_step(tmp_path: Path) -> None:
    path = record(tmp_path / "run", total_steps=9)
    seconds = {row["step"]: row["time/step"] for row in map(json.loads, (path / "metrics.jsonl").open()) if row["step"]}
    root = ElementTree.fromstring(f"<section>{time_section(read_run(path))}</section>")
    titles = [words(each).split(" the ")[0] for each in root.iter("figcaption")][3:]
    ordered = sorted(seconds, key=lambda step: seconds[step])
    assert titles == [f"Step {step}" for step in dict.fromkeys([9, ordered[4], ordered[-1]])]
    assert "A step, phase by phase" in words(root)


def test_a_run_without_a_timeline_has_its_bars_all_the_same(tmp_path: Path) -> None:
    path = record(tmp_path / "run", total_steps=3)
    (path / "timeline.jsonl").unlink()
    html = time_section(read_run(path))
    assert "phase by phase" not in html and "Seconds of each step" in html


def test_phases_and_lanes_are_called_and_coloured_alike() -> None:
    """What the trainer's lane shows of a phase is what the phase is called, or a part of its name."""
    assert len({*PHASE_COLOURS.values(), NEUTRAL}) == len(PHASE_COLOURS) + 1, "no two are alike"
    shared = {"generate": State.drawing, "update_actor": State.training, "sync": State.updating, "save": State.saving}
    for phase, state in shared.items():
        assert (LABELS[phase], PHASE_COLOURS[phase]) == (NAMES[state], COLOURS[state])
    assert {*LABELS} <= {*PHASES}
