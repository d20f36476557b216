"""Where the seconds of a run's steps go: bars of every step, shares, when each phase of some steps was open, and lanes.

Lanes are what each engine and the trainer did in the newest steps, with shares of the whole run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mcore_rl.tracking.charts import BarSeries, stacked_bars, ticks
from mcore_rl.tracking.clock import PhaseSpan
from mcore_rl.tracking.console import spent
from mcore_rl.tracking.lanes import TRAINER, LaneSpan, State, StepLanes, idle_share
from mcore_rl.tracking.metrics import PHASES
from mcore_rl.tracking.page import NEUTRAL, NUM_COLOURS, table, text
from mcore_rl.tracking.run_files import RecordedRun

STEPS_SHOWN = 6
COLOURS: Mapping[State, int] = {  # of the page's palette; grey stands, red is in trouble
    State.drawing: 0,
    State.training: 2,
    State.updating: 4,
    State.paused: 11,
    State.saving: 6,
    State.restarting: 10,
}
NOTE = (
    "What each engine and the trainer did in the newest steps. Where a lane is empty, it was idle; a step begins at "
    "each vertical line. An engine is paused where it stands for a weight update, before and after it receives. The "
    "trainer is training where it computes log-probs, values, advantages and updates."
)
NAMES = {state: state.value for state in State} | {State.updating: "updating weights"}  # as phases are called, too
# Phases as the lanes of engines and trainer call them; metrics and docs/metrics.md have their keys.
LABELS = {
    "generate": NAMES[State.drawing],
    "score": "grading",
    "logprobs": "log-probs",
    "process_rewards": "process rewards",
    "update_process_reward": "training its model",
    "update_critic": "training the critic",
    "update_actor": NAMES[State.training],
    "sync": NAMES[State.updating],
    "validate": "validating",
    "save": NAMES[State.saving],
}
PHASE_COLOURS = {  # of the page's palette, and of the tints of its hues; no two are alike, and none is ``NEUTRAL``
    "generate": COLOURS[State.drawing],
    "score": 5,
    "logprobs": 9,
    "reference": 3,
    "teacher": 8,
    "values": 7,
    "process_rewards": 12,
    "update_process_reward": 13,
    "advantages": 10,
    "update_critic": 15,
    "update_actor": COLOURS[State.training],
    "sync": COLOURS[State.updating],
    "validate": 1,
    "save": COLOURS[State.saving],
}
# Phases of roles of one's own take what is left, in the order of the table.
_LEFT = [colour for colour in range(NUM_COLOURS) if colour not in {NEUTRAL, *PHASE_COLOURS.values()}]
PHASE_COLOURS |= dict(zip((phase for phase in PHASES if phase not in PHASE_COLOURS), _LEFT, strict=False))
# Of a timeline, in units of its SVG.
WIDTH = 420
ROW = 20
LABEL = 112
RIGHT = 52
FOOT = 26
MAX_ROWS = 24  # phases and parts of one step


def time_section(run: RecordedRun) -> str:
    """The section's HTML."""
    steps = [step for step, _ in run.values("time/step")]
    if not steps:
        return "<h2>Time</h2><p class='soft'>No times were recorded.</p>"
    seconds = {phase: dict(run.values(f"time/{phase}")) for phase in run.phases()}
    parts = [
        BarSeries(
            LABELS.get(phase, phase), PHASE_COLOURS.get(phase, NEUTRAL), [times.get(step) or 0.0 for step in steps]
        )
        for phase, times in seconds.items()
    ]
    whole = {step: value or 0.0 for step, value in run.values("time/step")}
    named = [sum(part.values[k] for part in parts) for k in range(len(steps))]
    other = [max(0.0, whole[step] - known) for step, known in zip(steps, named, strict=True)]
    parts.append(BarSeries("the rest", NEUTRAL, other))
    total = sum(map(sum, (part.values for part in parts))) or 1.0
    rows = [
        [
            part.label,
            spent(sum(part.values)),
            spent(sum(part.values) / len(steps)),
            f"{100 * sum(part.values) / total:.1f}%",
        ]
        for part in parts
    ]
    chart = stacked_bars("Seconds of each step", "s", steps, parts)
    shares = table(["phase", "in all", "a step", "share"], rows)
    phases = f'<div class="charts">{chart}<figure>{shares}</figure></div>'
    return f"<h2>Time</h2>{phases}{lane_section(run)}{_timelines(run, whole)}"


def _timelines(run: RecordedRun, whole: dict[int, float]) -> str:
    """The timelines of the newest step, of the middle one by duration, and of the longest."""
    known = sorted((step for step in whole if step > 0 and run.timeline.get(step)), key=lambda step: whole[step])
    if not known:
        return ""
    picked: dict[int, list[str]] = {}
    for step, what in (
        (max(known), "the newest"),
        (known[len(known) // 2], "the median by duration"),
        (known[-1], "the longest"),
    ):
        picked.setdefault(step, []).append(what)
    figures = "".join(
        timeline(f"Step {step}", ", ".join(what), run.timeline[step], whole[step]) for step, what in picked.items()
    )
    note = "When each phase of a step was open, from its begin on; a part of a phase stands below it."
    return f'<h3>A step, phase by phase</h3><p class="soft">{note}</p><div class="charts">{figures}</div>'


def timeline(title: str, note: str, spans: Sequence[PhaseSpan], seconds: float) -> str:
    """A figure with a row for each phase and part, and a bar wherever it was open.  seconds: of the step."""
    names = list(dict.fromkeys(span.phase for span in spans))
    first = {name: min(span.start for span in spans if span.phase == name) for name in names}
    names.sort(key=lambda name: (first[name.partition("/")[0]], name.partition("/")[0], "/" in name, first[name]))
    names = names[:MAX_ROWS]
    marks = ticks(0.0, seconds, 5)
    end = max(seconds, *(span.end for span in spans))
    height = ROW * len(names) + FOOT

    def x(at: float) -> float:
        return LABEL + at / end * (WIDTH - LABEL - RIGHT)

    drawn = []
    for mark in marks:
        if mark <= end:
            drawn.append(f'<line class="grid" x1="{x(mark):.1f}" x2="{x(mark):.1f}" y1="0" y2="{height - FOOT}"/>')
            drawn.append(f'<text class="x" x="{x(mark):.1f}" y="{height - 10}">{mark:.4g} s</text>')
    for row, name in enumerate(names):
        mine = [span for span in spans if span.phase == name]
        top = row * ROW
        seconds_open = sum(span.end - span.start for span in mine)
        phase, _, part = name.partition("/")
        colour = PHASE_COLOURS.get(phase, NEUTRAL)
        drawn.append(
            f'<text x="{10 if part else 0}" y="{top + 14}">{text(LABELS.get(part or phase, part or phase))}</text>'
        )
        for span in mine:
            wide = max(1.0, x(span.end) - x(span.start))
            drawn.append(
                f'<rect class="c{colour}" x="{x(span.start):.1f}" y="{top + (6 if part else 3)}" width="{wide:.1f}" '
                f'height="{ROW - (12 if part else 6)}" data-start="{span.start:.4g}" data-end="{span.end:.4g}"/>'
            )
        drawn.append(f'<text class="y" x="{WIDTH}" y="{top + 14}">{seconds_open:.3g} s</text>')
    label = f"{title}: phases"
    return (
        f"<figure><figcaption><b>{text(title)}</b> <span>{text(note)}, {text(spent(seconds))}</span></figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{text(label)}">{"".join(drawn)}</svg></figure>'
    )


def lane_section(run: RecordedRun) -> str:
    """The section's HTML; "" for a run that recorded no lanes, or whose lanes have no engine."""
    steps = {step: lanes for step, lanes in run.lanes.items() if step > 0 and len(lanes.lanes) > 1}
    if not steps:
        return ""
    return f'<h3>Engines and trainer</h3><p class="soft">{text(NOTE)}</p>{_lane_chart(steps)}{_lane_shares(steps)}'


def _lane_chart(steps: Mapping[int, StepLanes]) -> str:
    """A figure with a row for each lane over the newest steps, which are shown end to end."""
    newest = sorted(steps)[-STEPS_SHOWN:]
    begins = dict[int, float]()
    whole = 0.0
    for step in newest:
        begins[step] = whole
        whole += steps[step].seconds
    whole = whole or 1.0
    names = dict.fromkeys(name for step in newest for name in steps[step].lanes)
    shown = dict[State, None]()
    rows = list[str]()
    places = [_percent(begins[step], whole) for step in newest]
    lines = "".join(f'<line class="grid" x1="{place}" x2="{place}" y1="0" y2="100%"/>' for place in places)
    for name in names:
        bars = ""
        seconds = dict.fromkeys(State, 0.0)
        for step in newest:
            for span in steps[step].lanes.get(name, ()):
                shown[span.state] = None
                seconds[span.state] += span.end - span.start
                bars += _lane_bar(span, begins[step], whole)
        label = f"{name}: what it did"
        rows.append(
            f'<div class="lane"><b>{text(name)}</b><svg role="img" aria-label="{text(label)}">{lines}{bars}</svg>'
            f"<span>idle {idle_share(seconds, whole):.0%}</span></div>"
        )
    marks = "".join(f'<text x="{_percent(begins[step], whole)}" y="12">step {step}</text>' for step in newest)
    head = f'<div class="lane"><b></b><svg aria-hidden="true">{marks}</svg><span></span></div>'
    keys = "".join(f'<li><i class="c{COLOURS[state]}"></i>{NAMES[state]}</li>' for state in COLOURS if state in shown)
    title = f"Steps {newest[0]} to {newest[-1]}" if len(newest) > 1 else f"Step {newest[0]}"
    caption = f"<figcaption><b>{title}</b> <span>{text(spent(whole))}</span></figcaption>"
    return f'<figure class="lanes">{caption}{head}{"".join(rows)}<ul>{keys}</ul></figure>'


def _lane_bar(span: LaneSpan, begin: float, whole: float) -> str:
    """A bar at least as wide as can be seen; with its seconds since the first step that is shown."""
    start = begin + span.start
    end = begin + span.end
    wide = max(0.1, 100 * (end - start) / whole)
    said = f"{NAMES[span.state]}, {end - start:.3g} s"
    return (
        f'<rect class="c{COLOURS[span.state]}" x="{_percent(start, whole)}" y="2" width="{wide:.3f}%" height="14" '
        f'data-start="{start:.5g}" data-end="{end:.5g}"><title>{said}</title></rect>'
    )


def _percent(seconds: float, whole: float) -> str:
    return f"{100 * seconds / whole:.3f}%"


def _lane_shares(steps: Mapping[int, StepLanes]) -> str:
    """A table: of each lane the shares of the time of all steps in which it was there."""
    seconds = dict[str, dict[State, float]]()
    wholes = dict[str, float]()
    for each in steps.values():
        for name, spans in each.lanes.items():
            wholes[name] = wholes.get(name, 0.0) + each.seconds
            of_lane = seconds.setdefault(name, dict.fromkeys(State, 0.0))
            for span in spans:
                of_lane[span.state] += span.end - span.start
    states = [state for state in COLOURS if any(of_lane[state] for of_lane in seconds.values())]
    rows = [_lane_row(name, seconds[name], wholes[name], states) for name in _trainer_first(seconds)]
    caption = f"<figcaption><b>Shares of the time of {len(steps)} steps</b></figcaption>"
    return f"<figure>{caption}{table(['', *(NAMES[state] for state in states), 'idle'], rows)}</figure>"


def _lane_row(name: str, seconds: Mapping[State, float], whole: float, states: Sequence[State]) -> list[str]:
    of_states = [f"{seconds[state] / (whole or 1.0):.1%}" for state in states]
    return [name, *of_states, f"{idle_share(seconds, whole):.1%}"]


def _trainer_first(names: Mapping[str, object]) -> list[str]:
    return sorted(names, key=lambda name: name != TRAINER)
