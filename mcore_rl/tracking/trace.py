"""A run as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing: a track for the trainer and for each engine.

Chrome's Trace Event Format: complete events (``X``) with microseconds since the first step began, names of tracks
(``M``), and counters (``C``) of what was drawn ahead.  The trainer's phases stand below its states.  Written from the
files of the run directory; a run that was resumed has a gap where nothing ran.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mcore_rl.ground.errors import ConfigError, Violation
from mcore_rl.tracking.atomic import write_whole
from mcore_rl.tracking.clock import PhaseSpan
from mcore_rl.tracking.lanes import LANES, TRAINER, StepLanes
from mcore_rl.tracking.metrics import is_phase
from mcore_rl.tracking.run_files import RecordedRun, read_run

PHASES_TRACKS = ("phases", "phases, beside")  # those that overlap without nesting are on the second
COUNTERS = ("rollout/buffer", "rollout/under_way", "rollout/staleness_max")
PROCESS = 1


def write_trace(run_dir: Path | str, path: Path) -> Path:
    """Write the trace of the run in ``run_dir`` to ``path``.  ConfigError: it has no lanes, or cannot be written."""
    run = read_run(run_dir)
    if not run.lanes:
        problem = f"has no {LANES}"
        remedy = "Give the directory of a run of mcore-rl train that has taken a step"
        raise ConfigError([Violation("run_dir", run_dir, problem, remedy)])
    content = {"traceEvents": list(events(run)), "displayTimeUnit": "ms", "otherData": {"run": run.name}}
    try:
        write_whole(path, json.dumps(content, separators=(",", ":")))
    except OSError as error:
        problem = f"cannot be written: {error}"
        raise ConfigError([Violation("--trace", path, problem, "Name a file that can be")]) from error
    return path


def events(run: RecordedRun) -> Iterator[dict[str, Any]]:
    """The events of ``run``, track by track within a step."""
    begun = min(lanes.at for lanes in run.lanes.values())
    names = dict.fromkeys([TRAINER, *PHASES_TRACKS, *(name for lanes in run.lanes.values() for name in lanes.lanes)])
    tracks = {name: number for number, name in enumerate(names, 1)}
    yield {"ph": "M", "pid": PROCESS, "name": "process_name", "args": {"name": run.name}}
    for name, number in tracks.items():
        yield {"ph": "M", "pid": PROCESS, "tid": number, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": PROCESS, "tid": number, "name": "thread_sort_index", "args": {"sort_index": number}}
    metrics = {row["step"]: row for row in run.steps}
    for step, lanes in run.lanes.items():
        at = lanes.at - begun
        yield from _of_lanes(step, lanes, at, tracks)
        yield from _of_phases(step, run.timeline.get(step, ()), at, [tracks[name] for name in PHASES_TRACKS])
        for key in COUNTERS:
            if isinstance(value := metrics.get(step, {}).get(key), int | float):
                yield {"ph": "C", "pid": PROCESS, "name": key, "ts": _us(at), "args": {"value": value}}


def _of_lanes(step: int, lanes: StepLanes, at: float, tracks: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    for name, spans in lanes.lanes.items():
        for span in spans:
            yield _complete(span.state.value, at + span.start, at + span.end, tracks[name], step)


def _of_phases(step: int, spans: Sequence[PhaseSpan], at: float, tracks: Sequence[int]) -> Iterator[dict[str, Any]]:
    """The step and its phases: each inside what is open on its track, as viewers need it, or on the next track."""
    whole = PhaseSpan(f"step {step}", 0.0, max((span.end for span in spans), default=0.0))
    open_ends: dict[int, list[float]] = {track: [] for track in tracks}
    for span in [whole, *sorted(spans, key=lambda span: (span.start, -span.end))]:
        if span is not whole and not is_phase(span.phase.partition("/")[0]):
            continue  # of tasks beside the phases, which the engines' tracks show
        for track, ends in open_ends.items():
            while ends and ends[-1] <= span.start:
                ends.pop()
            if not ends or span.end <= ends[-1]:
                ends.append(span.end)
                yield _complete(span.phase, at + span.start, at + span.end, track, step)
                break


def _complete(name: str, start: float, end: float, track: int, step: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": PROCESS,
        "tid": track,
        "name": name,
        "cat": "lane",
        "ts": _us(start),
        "dur": max(0, _us(end) - _us(start)),
        "args": {"step": step},
    }


def _us(seconds: float) -> int:
    return round(1e6 * seconds)
