from __future__ import annotations

import json
from pathlib import Path

import pytest

from mcore_rl.tracking.clock import MAX_SPANS, PhaseSpan, TimelineFile, read_timeline


def test_spans_read_back_and_a_resumed_run_drops_later_steps(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    spans = [PhaseSpan("generate", 0.0, 1.25), PhaseSpan("validate/generate", 2.0, 2.5)]
    file = TimelineFile(path, -1)
    for step in range(4):
        file.write(step, spans)
    file.close()
    assert read_timeline(path) == {step: tuple(spans) for step in range(4)}
    TimelineFile(path, 2).close()
    assert list(read_timeline(path)) == [0, 1, 2]
    assert read_timeline(tmp_path / "none") == {}


def test_a_step_of_endless_spans_stays_a_line(tmp_path: Path) -> None:
    file = TimelineFile(tmp_path / "timeline.jsonl", -1)
    file.write(1, [PhaseSpan("sync", k, k + 0.5) for k in range(2 * MAX_SPANS)])
    file.close()
    assert len(read_timeline(tmp_path / "timeline.jsonl")[1]) == MAX_SPANS


@pytest.mark.parametrize("bad", [["generate", 2, 1], ["generate", -1, 1], ["generate", "0", 1], [1, 0, 1], "x", None])
def test_what_is_no_span_is_left_out(tmp_path: Path, bad: object) -> None:
    path = tmp_path / "timeline.jsonl"
    path.write_text(json.dumps({"step": 1, "spans": [["sync", 0, 1], bad]}) + '\n{"step": 2, "spans": 7}\n{"step": 3')
    assert read_timeline(path) == {1: (PhaseSpan("sync", 0, 1),)}
