"""Shows a plan and a search: tables for the terminal, one self-contained HTML page, and plain values for a file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from mcore_rl.config.cluster import ClusterConfig, ResidualMemory
from mcore_rl.config.offline import OfflineConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.planning.overheads import GIB, HOST_LINK_GB_S, LINK_EFFICIENCY, ProcessMemory
from mcore_rl.planning.peaks import Peak, Place, Plan, Row
from mcore_rl.planning.search import Candidate, Found
from mcore_rl.tracking.page import NUM_COLOURS, page, table, text

PLACES = {Place.device: "a device", Place.host: "a node's host memory", Place.disk: "the disk"}


def headline(plan: Plan) -> str:
    """One line about the planned run: its title, size, devices and layout."""
    size = f"{plan.num_parameters / 1e9:.1f}B" if plan.num_parameters >= 1e8 else f"{plan.num_parameters / 1e6:.2f}M"
    nodes = "1 node" if plan.num_nodes == 1 else f"{plan.num_nodes} nodes"
    return f"{plan.title}: {size} parameters on {plan.num_gpus} ranks, {nodes}; {plan.layout}"


def short_line(plan: Plan) -> str:
    """One line about the highest peak on a device and the time of a step, for the start of a run."""
    peak = max((each for each in plan.peaks if each.place is Place.device), key=lambda each: each.num_bytes)
    of = f" of {gib(peak.capacity)}" if peak.capacity else ""
    needs = f"{peak.phase.value} needs {gib(peak.num_bytes)}{of} GiB ({peak.where})"
    return f"the plan: {needs}, a step takes {range_text(plan)}; see plan.json"


def gib(num_bytes: int) -> str:
    """``num_bytes`` in GiB, with one or two decimals."""
    value = num_bytes / GIB
    return f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def seconds_text(seconds: float) -> str:
    """``seconds`` in hours, minutes or seconds, with unit."""
    if seconds >= 7200:
        return f"{seconds / 3600:.1f} h"
    if seconds >= 120:
        return f"{seconds / 60:.1f} min"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def range_text(plan: Plan) -> str:
    """The least and the most seconds of a step."""
    least, most = map(seconds_text, plan.step_range_s)
    return f"{least} to {most}"


def rows_table(head: Sequence[str], rows: Iterable[Sequence[str]] = ()) -> Table:
    """``rows`` below ``head``, without lines."""
    shown = Table(*head, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        shown.add_row(*row)
    return shown


def plan_tables(plan: Plan) -> Group:
    """The plan as tables for the terminal."""
    parts: list[Any] = [Text(headline(plan), style="bold")]
    for place in Place:
        peaks = [peak for peak in plan.peaks if peak.place is place]
        if peaks:
            parts.append(_memory_table(place, peaks))
    parts += [rows_table(("expected time of a step", "", ""), _time_rows(plan)), Text(plan.calibration.text)]
    if plan.concurrency is not None:
        parts.append(Text(f"the cache of an engine holds {plan.concurrency:.1f} sequences of the greatest length"))
    parts += [Text(f"note: {note}") for note in (plan.form, *plan.gains, *plan.notes) if note]
    verdict = Text("fits", style="green") if plan.fits else Text("does not fit", style="bold red")
    return Group(*parts, verdict)


def _names(peaks: Iterable[Peak]) -> list[str]:
    return list(dict.fromkeys(row.part for peak in peaks for row in peak.rows))


def _cell(peak: Peak, name: str) -> str:
    rows: list[Row] = [row for row in peak.rows if row.part == name]
    if not rows:
        return ""
    number = gib(sum(row.num_bytes for row in rows))
    return number if all(row.exact for row in rows) else f"~{number}"


def _memory_rows(peaks: Sequence[Peak]) -> list[list[str]]:
    rows = [[name, *(_cell(peak, name) for peak in peaks)] for name in _names(peaks)]
    rows.append(["all", *(gib(peak.num_bytes) for peak in peaks)])
    rows.append(["there is", *(gib(peak.capacity) if peak.capacity else "?" for peak in peaks)])
    rows.append(["where", *(peak.where for peak in peaks)])
    return rows


def _memory_table(place: Place, peaks: Sequence[Peak]) -> Table:
    shown = rows_table([f"GiB of {PLACES[place]}"])
    for peak in peaks:
        shown.add_column(peak.phase.value, justify="right")
    for row in _memory_rows(peaks):
        styles = ["" if row[0] != "all" or peak.fits else "red" for peak in peaks]
        shown.add_row(row[0], *(Text(value, style) for value, style in zip(row[1:], styles, strict=True)))
    return shown


def _time_rows(plan: Plan) -> list[tuple[str, str, str]]:
    total = max(plan.step_s, 1e-9)
    rows = [(part, seconds_text(seconds), f"{seconds / total:.0%}") for part, seconds in plan.seconds.items()]
    return [*rows, ("all", range_text(plan), "")]


def _search_rows(search: Found, written: Candidate | None) -> list[list[str]]:
    """A row of ``SEARCH_HEAD`` for each layout.  written: the run as it is written, the first row, if given."""
    rows = []
    for each in [*([written] if written else []), *search.best]:
        actor = each.run.actor
        rollout = each.run.rollout if isinstance(each.run, RunConfig) else None
        layout = {name: getattr(actor.parallel, name) for name in ("tp", "pp", "vpp", "cp", "ep", "etp")}
        axes = ",".join(f"{name}={size}" for name, size in layout.items() if size > 1) or "all 1"
        rows.append(
            [
                seconds_text(each.plan.step_s),
                axes,
                f"{actor.recompute.value}, {actor.microbatch_tokens}",
                "" if rollout is None else f"{rollout.layout}, {rollout.gpu_memory_utilization:g}",
                "; ".join(each.reasons),
            ]
        )
    return rows


SEARCH_HEAD = ("step", "training", "recompute, microbatch", "rollout, share", "why")


def as_written(run: RunConfig | OfflineConfig, planned: Plan) -> Candidate:
    """The run that was searched for, to be shown beside what was found."""
    reason = "as it is written" if planned.fits else f"as it is written: does not fit, {planned.violations[0].problem}"
    return Candidate(run=run, plan=planned, overrides=(), reasons=(reason,))


def search_tables(search: Found, written: Candidate | None = None) -> Group:
    """A search as tables for the terminal: the best runs, the overrides of the first, and the refused settings."""
    best = rows_table(SEARCH_HEAD, _search_rows(search, written))
    refused = rows_table(("refused", "why"), [(str(count), why) for why, count in search.refused.most_common()])
    parts: list[Any] = [Text(f"{search.considered} settings looked at in {search.seconds:.1f} s"), best]
    if search.best:
        parts += [Text("the first, as overrides:"), Text(" ".join(search.best[0].overrides))]
    return Group(*parts, refused)


def plan_page(plan: Plan) -> str:
    """The plan as one HTML page without external resources."""
    return page(f"Plan: {plan.title}", [f"<h1>{text(plan.title)}</h1>", *_plan_sections(plan)])


def search_page(search: Found, written: Candidate) -> str:
    """A search that found something, as one HTML page: the run as it is written, the layouts, and the fastest whole."""
    first = search.best[0]
    title = written.plan.title
    as_is = "" if written.plan.fits else ", and it does not fit"
    verdict = f"As it is written, a step takes {range_text(written.plan)}{as_is}. "
    verdict += f"With the fastest layout it takes {range_text(first.plan)}."
    refused = [[count, why] for why, count in search.refused.most_common()]
    sections = [
        f"<h1>Layouts of {text(title)}</h1>",
        f'<div class="verdict good"><p>{verdict}</p></div>',
        "<h2>Layouts that fit, after the run as it is written</h2>",
        table(SEARCH_HEAD, _search_rows(search, written)),
        f"<h2>The fastest layout</h2><pre>{text(' '.join(first.overrides))}</pre>",
        *_plan_sections(first.plan),
        "<h2>Refused</h2>",
        table(["settings", "why"], refused),
    ]
    return page(f"Layouts: {title}", sections)


def _plan_sections(plan: Plan) -> list[str]:
    """What a page says of one plan, below its title."""
    good = "good" if plan.fits else "bad"
    verdict = "It fits." if plan.fits else "It does not fit."
    wrong = "".join(f"<p>{text(violation)}</p>" for violation in plan.violations)
    sections = [
        f"<p>{text(headline(plan))}</p>",
        f'<div class="verdict {good}"><p>{verdict} A step takes {range_text(plan)}.</p>{wrong}</div>',
        '<p class="soft">~ is an estimate; all else is counted to the byte.</p>',
    ]
    for place in Place:
        peaks = [peak for peak in plan.peaks if peak.place is place]
        if peaks:
            head = [f"GiB of {PLACES[place]}", *(peak.phase.value for peak in peaks)]
            sections += [f"<h2>{text(PLACES[place].capitalize())}</h2>", _bars(peaks), table(head, _memory_rows(peaks))]
    sections += ["<h2>Expected time of a step</h2>", table(["part", "time", "share"], _time_rows(plan))]
    sections.append(f"<p>{text(plan.calibration.text)}</p>")
    sections += [f"<p>{text(note)}</p>" for note in (plan.form, *plan.gains, *plan.notes) if note]
    return sections


def _bars(peaks: Sequence[Peak]) -> str:
    """A bar for each phase, divided into its parts, with a mark at the capacity.  Labels have one size at any width."""
    widest = max(max(peak.num_bytes, peak.capacity or 0) for peak in peaks) or 1
    names = _names(peaks)
    lines = []
    for peak in peaks:
        begin = 0.0
        drawn = ""
        for name in names:
            size = 100 * sum(row.num_bytes for row in peak.rows if row.part == name) / widest
            place = f'x="{begin:.3f}%" y="2" width="{size:.3f}%" height="14"'
            drawn += f'<rect class="c{names.index(name) % NUM_COLOURS}" {place}><title>{text(name)}</title></rect>'
            begin += size
        if peak.capacity:
            at = f"{min(99.9, 100 * peak.capacity / widest):.3f}%"
            drawn += f'<line class="axis" x1="{at}" x2="{at}" y1="0" y2="18"/>'
        label = f"{peak.phase.value}: memory"
        lines.append(
            f'<div class="lane"><b>{text(peak.phase.value)}</b><svg role="img" aria-label="{text(label)}">{drawn}</svg>'
            f"<span>{gib(peak.num_bytes)} GiB</span></div>"
        )
    keys = "".join(f'<li><i class="c{i % NUM_COLOURS}"></i>{text(name)}</li>' for i, name in enumerate(names))
    return f'<figure class="lanes">{"".join(lines)}<ul>{keys}</ul></figure>'


def plan_values(plan: Plan) -> dict[str, Any]:
    """The plan as plain values for a JSON file: bytes and seconds as numbers."""
    return {
        "title": plan.title,
        "layout": plan.layout,
        "fits": plan.fits,
        "num_nodes": plan.num_nodes,
        "num_gpus": plan.num_gpus,
        "num_parameters": plan.num_parameters,
        "step_s": plan.step_s,
        "step_range_s": list(plan.step_range_s),
        "calibration": plan.calibration.text,
        "seconds": plan.seconds,
        "tokens": plan.tokens,
        "concurrency": plan.concurrency,
        "violations": [str(violation) for violation in plan.violations],
        "notes": [*plan.gains, *plan.notes],
        "form": plan.form,
        "peaks": [
            {
                "phase": peak.phase.value,
                "place": peak.place.value,
                "where": peak.where,
                "num_bytes": peak.num_bytes,
                "capacity": peak.capacity,
                "parts": [{"part": row.part, "num_bytes": row.num_bytes, "exact": row.exact} for row in peak.rows],
            }
            for peak in plan.peaks
        ],
    }


def search_values(search: Found, written: Candidate | None = None) -> dict[str, Any]:
    """A search as plain values for a JSON file.  written: the run as it is written."""
    return {
        "as_written": None if written is None else plan_values(written.plan),
        "considered": search.considered,
        "seconds": search.seconds,
        "refused": search.refused,
        "best": [
            {"overrides": list(each.overrides), "reasons": list(each.reasons), "plan": plan_values(each.plan)}
            for each in search.best
        ],
    }


def measured_lines(cluster: ClusterConfig) -> list[str]:
    """A line for each measured number that replaces an assumed one (``ClusterConfig.reached``, ``residuals``)."""
    assumed = {
        "intra_node_gb_s": f"{cluster.intra_node_gb_s:g} * {LINK_EFFICIENCY:g} of the yaml",
        "inter_node_gb_s": f"{cluster.inter_node_gb_s:g} * {LINK_EFFICIENCY:g} of the yaml",
        "host_link_gb_s": f"{HOST_LINK_GB_S:g}, assumed",
    }
    source = cluster.measured or f"{cluster.name}.yaml"
    lines = [
        f"{name}: {getattr(cluster.reached, name):.4g} GB/s, from {source}, in place of {before}"
        for name, before in assumed.items()
        if getattr(cluster.reached, name) is not None
    ]
    now = ProcessMemory.of(cluster)
    before = ProcessMemory.of(replace(cluster, residuals=ResidualMemory()))
    for name, what in (
        ("context", "of a device, by the context of a process"),
        ("collectives", "of a device, by the communicators of a process"),
        ("trainer", "of the host, by a training process and its Ray actor"),
        ("engine", "of the host, by an engine and its Ray actor"),
    ):
        if name in now.measured:
            ours, theirs = (getattr(each, name) / 2**20 for each in (now, before))
            lines.append(f"{ours:,.0f} MiB {what}, from {source}, in place of {theirs:,.0f}, assumed")
    if "pinned_ratio" in now.measured:
        lines.append(f"page-locked memory takes {now.pinned_ratio:.3f} times what is asked for, from {source}")
    return lines
