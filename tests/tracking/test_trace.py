"""A trace is read back as a viewer of Chrome's Trace Event Format reads it."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.cli import main
from mcore_rl.tracking.clock import TIMELINE, PhaseSpan, TimelineFile, read_timeline
from mcore_rl.tracking.lanes import LANES, read_lanes
from mcore_rl.tracking.trace import PHASES_TRACKS
from tests.tracking.recorded_run import record


def traced(run: Path, tmp_path: Path) -> list[dict[str, Any]]:
    path = tmp_path / "trace.json"
    assert main(["report", str(run), "--trace", str(path)]) == 0
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def by_track(events: list[dict[str, Any]]) -> dict[str, list[tuple[str, int, int]]]:
    """(name, begin, end) of the complete events of each named track, microseconds."""
    names = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    tracks = defaultdict(list)
    for each in events:
        if each["ph"] == "X":
            tracks[names[each["tid"]]].append((each["name"], each["ts"], each["ts"] + each["dur"]))
    return tracks


def test_every_lane_is_a_track_with_its_spans_at_their_times(tmp_path: Path) -> None:
    run = record(tmp_path / "run", total_steps=4)
    tracks, recorded = by_track(traced(run, tmp_path)), read_lanes(run / LANES)
    for name in ("trainer", "engine 0", "engine 1"):
        expected = [
            (span.state.value, 20.0 * (step - 1) + span.start, 20.0 * (step - 1) + span.end)
            for step, lanes in recorded.items()
            for span in lanes.lanes[name]
        ]
        assert [each[0] for each in tracks[name]] == [each[0] for each in expected]
        for k in (1, 2):
            assert [each[k] / 1e6 for each in tracks[name]] == pytest.approx([each[k] for each in expected], abs=1e-5)


def test_events_of_a_track_lie_inside_or_after_one_another(tmp_path: Path) -> None:
    run = record(tmp_path / "run", total_steps=3)
    file = TimelineFile(run / TIMELINE, 1)  # as asyncio's tasks leave it: grading begins before drawing ends
    spans = [
        PhaseSpan("generate", 0, 5),
        PhaseSpan("score", 3, 6),
        PhaseSpan("drawing", 4, 9),
        PhaseSpan("update_actor", 6, 8),
        PhaseSpan("validate", 8, 9),
        PhaseSpan("validate/score", 8, 8.5),
    ]
    file.write(2, spans)
    file.close()
    tracks = by_track(traced(run, tmp_path))
    events_by_name = Counter(name for events in tracks.values() for name, _, _ in events)
    timeline = read_timeline(run / TIMELINE)
    recorded = Counter(span.phase for spans in timeline.values() for span in spans if span.phase != "drawing")
    assert {name: events_by_name[name] for name in recorded} == recorded, "each phase is on one of the tracks"
    assert events_by_name["step 1"] == events_by_name["step 2"] == 1
    assert "drawing" not in {name for track in PHASES_TRACKS for name, _, _ in tracks[track]}, "engines' tracks have it"
    for events in tracks.values():
        ends: list[int] = []
        for _, begin, end in sorted(events, key=lambda each: (each[1], -each[2])):
            while ends and ends[-1] <= begin:
                ends.pop()
            assert not ends or end <= ends[-1]
            ends.append(end)


def test_counters_have_the_numbers_of_the_steps(tmp_path: Path) -> None:
    run = record(tmp_path / "run", total_steps=3)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row | {"rollout/buffer": 3.0 * row["step"]} for row in rows]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    counted = [each for each in traced(run, tmp_path) if each["ph"] == "C"]
    assert [(each["name"], each["ts"], each["args"]["value"]) for each in counted] == [
        ("rollout/buffer", 20_000_000 * (step - 1), 3.0 * step) for step in (1, 2, 3)
    ]


def test_what_cannot_be_traced_is_refused_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, other = record(tmp_path / "run", total_steps=2), record(tmp_path / "other", total_steps=2)
    trace = tmp_path / "trace.json"
    assert main(["report", str(run), str(other), "--trace", str(trace)]) == 2
    assert "2 runs are named" in capsys.readouterr().err
    (run / LANES).unlink()
    assert main(["report", str(run), "--trace", str(trace)]) == 2
    said = capsys.readouterr().err
    assert "lanes.jsonl" in said and "Traceback" not in said
    assert not trace.exists()
