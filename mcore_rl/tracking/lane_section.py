"""The lanes of a report: what each engine and the trainer did in the newest steps, and shares of the whole run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mcore_rl.tracking.console import spent
from mcore_rl.tracking.lanes import TRAINER, LaneSpan, State, StepLanes, idle_share
from mcore_rl.tracking.page import table, text
from mcore_rl.tracking.run_files import RecordedRun

STEPS_SHOWN = 6
COLOURS: Mapping[State, int] = {  # of the page's palette; grey stands, red is in trouble
    State.drawing: 0, State.training: 2, State.updating: 4, State.paused: 11, State.saving: 6, State.restarting: 10,
}  # fmt: skip
NOTE = (
    "What each engine and the trainer did in the newest steps. Where a lane is empty, it was idle; a step begins at "
    "each vertical line. An engine is paused where it stands for a weight update, before and after it receives. The "
    "trainer is training where it computes log-probs, values, advantages and updates."
)
NAMES = {state: state.value for state in State} | {State.updating: "updating weights"}  # as phases are called, too


def lane_section(run: RecordedRun) -> str:
    """The section's HTML; "" for a run that recorded no lanes, or whose lanes have no engine."""
    steps = {step: lanes for step, lanes in run.lanes.items() if step > 0 and len(lanes.lanes) > 1}
    if not steps:
        return ""
    return f'<h3>Engines and trainer</h3><p class="soft">{text(NOTE)}</p>{_chart(steps)}{_shares(steps)}'


def _chart(steps: Mapping[int, StepLanes]) -> str:
    """A figure with a row for each lane over the newest steps, which are shown end to end."""
    newest = sorted(steps)[-STEPS_SHOWN:]
    begins, whole = dict[int, float](), 0.0
    for step in newest:
        begins[step] = whole
        whole += steps[step].seconds
    whole = whole or 1.0
    names = dict.fromkeys(name for step in newest for name in steps[step].lanes)
    shown, rows = dict[State, None](), list[str]()
    lines = "".join(f'<line class="grid" x1="{_at(begins[s], whole)}" x2="{_at(begins[s], whole)}" y1="0" y2="100%"/>'
                    for s in newest)  # fmt: skip
    for name in names:
        bars, seconds = "", dict.fromkeys(State, 0.0)
        for step in newest:
            for span in steps[step].lanes.get(name, ()):
                shown[span.state] = None
                seconds[span.state] += span.end - span.start
                bars += _bar(span, begins[step], whole)
        label = f"{name}: what it did"
        rows.append(
            f'<div class="lane"><b>{text(name)}</b><svg role="img" aria-label="{text(label)}">{lines}{bars}</svg>'
            f"<span>idle {idle_share(seconds, whole):.0%}</span></div>"
        )
    marks = "".join(f'<text x="{_at(begins[step], whole)}" y="12">step {step}</text>' for step in newest)
    head = f'<div class="lane"><b></b><svg aria-hidden="true">{marks}</svg><span></span></div>'
    keys = "".join(f'<li><i class="c{COLOURS[state]}"></i>{NAMES[state]}</li>' for state in COLOURS if state in shown)
    title = f"Steps {newest[0]} to {newest[-1]}" if len(newest) > 1 else f"Step {newest[0]}"
    caption = f"<figcaption><b>{title}</b> <span>{text(spent(whole))}</span></figcaption>"
    return f'<figure class="lanes">{caption}{head}{"".join(rows)}<ul>{keys}</ul></figure>'


def _bar(span: LaneSpan, begin: float, whole: float) -> str:
    """A bar at least as wide as can be seen; with its seconds since the first step that is shown."""
    start, end = begin + span.start, begin + span.end
    wide = max(0.1, 100 * (end - start) / whole)
    said = f"{NAMES[span.state]}, {end - start:.3g} s"
    return (
        f'<rect class="c{COLOURS[span.state]}" x="{_at(start, whole)}" y="2" width="{wide:.3f}%" height="14" '
        f'data-start="{start:.5g}" data-end="{end:.5g}"><title>{said}</title></rect>'
    )


def _at(seconds: float, whole: float) -> str:
    return f"{100 * seconds / whole:.3f}%"


def _shares(steps: Mapping[int, StepLanes]) -> str:
    """A table: of each lane the shares of the time of all steps in which it was there."""
    seconds, wholes = dict[str, dict[State, float]](), dict[str, float]()
    for each in steps.values():
        for name, spans in each.lanes.items():
            wholes[name] = wholes.get(name, 0.0) + each.seconds
            of_lane = seconds.setdefault(name, dict.fromkeys(State, 0.0))
            for span in spans:
                of_lane[span.state] += span.end - span.start
    states = [state for state in COLOURS if any(of_lane[state] for of_lane in seconds.values())]
    rows = [_row(name, seconds[name], wholes[name], states) for name in _trainer_first(seconds)]
    caption = f"<figcaption><b>Shares of the time of {len(steps)} steps</b></figcaption>"
    return f"<figure>{caption}{table(['', *(NAMES[state] for state in states), 'idle'], rows)}</figure>"


def _row(name: str, seconds: Mapping[State, float], whole: float, states: Sequence[State]) -> list[str]:
    of_states = [f"{seconds[state] / (whole or 1.0):.1%}" for state in states]
    return [name, *of_states, f"{idle_share(seconds, whole):.1%}"]


def _trainer_first(names: Mapping[str, object]) -> list[str]:
    return sorted(names, key=lambda name: name != TRAINER)
