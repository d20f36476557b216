"""Shows a rehearsal: tables for the terminal, one HTML page with the memory over time, plain values for a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from mcore_rl.families.flops import tower_flops, train_flops
from mcore_rl.parallel.layout import Layout
from mcore_rl.planning.tables import gib
from mcore_rl.rehearsal.host_reads import reason_of
from mcore_rl.rehearsal.ledger import Ledger, MemoryKind
from mcore_rl.rehearsal.part import Planned
from mcore_rl.rehearsal.rank import SCORE, TRAIN, TRAIN_AGAIN, Rehearsal, microbatch_lengths
from mcore_rl.tracking.charts import BarSeries, stacked_bars
from mcore_rl.tracking.page import page, table, text

SAMPLES = 100  # of the picture
LARGEST = 12  # entries of what lives at the peak
MEMORY_HEAD = ("GiB at the peak of", *(kind.value for kind in MemoryKind), "all", "plan", "off by")
TRAFFIC_HEAD = ("group", "ranks", "operation", "runs", "calls", "GiB", "GiB on the wire")
READS_HEAD = ("phase", "reads", "runs", "operation", "where", "why")


def headline(rehearsal: Rehearsal) -> str:
    """One line: what was rehearsed."""
    part = rehearsal.part
    layout = Layout.of(part.parallel, part.world_size)
    coords = layout.coords(part.rank)
    stage = f", stage {coords.pp + 1} of {layout.pp}" if layout.pp > 1 else ""
    return (
        f"{part.role}, rank {part.rank} of {part.world_size}{stage}; {part.parallel}; "
        f"{rehearsal.num_parameters / 1e9:.2f}B parameters here; "
        f"{rehearsal.num_microbatches} of {part.num_microbatches} microbatches of {part.tokens} tokens"
    )


def notes(rehearsal: Rehearsal, planned: Planned) -> list[str]:
    """What a reader must know of these numbers."""
    said = []
    if planned.fused:
        said.append("the run takes Transformer Engine's layers; rehearsed are the local ones, which keep more")
    if rehearsal.part.model.moe is not None and rehearsal.part.parallel.ep > 1:
        share = min(rehearsal.part.imbalance, rehearsal.part.parallel.ep)
        said.append(f"this rank's experts get {share:g} times their even share of rows, as in the plan")
    said.append(f"took {rehearsal.seconds:.0f} s and {rehearsal.resident / 2**20:.0f} MiB of this machine")
    return said


def difference(planned: int, counted: int) -> str:
    """The relative difference of the planned bytes from the counted ones."""
    return f"{100 * (planned / counted - 1):+.1f} %" if counted else ""


def memory_rows(rehearsal: Rehearsal, planned: Planned) -> list[list[str]]:
    """For each phase the greatest memory, by kind, beside the planner's figure."""
    rows = []
    for phase in rehearsal.ledger.phases:
        peak = rehearsal.ledger.peak(phase)
        last = ["", ""]
        if phase.name == TRAIN_AGAIN:
            last = [gib(planned.peak), difference(planned.peak, peak.num_bytes)]
        rows.append([phase.name, *(gib(peak.by_kind[kind]) for kind in MemoryKind), gib(peak.num_bytes), *last])
    state = planned.state
    step = planned.train
    parts = [state.weights, state.gradients, state.optimizer, step.activations + step.logits, step.working]
    rows.append(["the plan", *(gib(size) for size in parts), gib(planned.peak), "", ""])
    return rows


def traffic_rows(ledger: Ledger, phase: str) -> list[list[str]]:
    """The collectives of one phase."""
    return [
        [
            key.group,
            str(key.size),
            key.operation,
            _runs(key.per_step),
            str(total.calls),
            f"{total.payload / 2**30:.3f}",
            f"{total.wire / 2**30:.3f}",
        ]
        for key, total in sorted(ledger.traffic.items(), key=lambda item: -item[1].wire)
        if key.phase == phase and key.size > 1
    ]


def read_rows(ledger: Ledger) -> list[list[str]]:
    """Every place where the host waits for the device, by phase; the second training step is like the first."""
    return [
        [
            read.phase,
            str(count),
            _runs(read.per_step),
            read.operation,
            f"{read.path}:{read.line} {read.function}",
            reason_of(read) or "NOT ALLOWED",
        ]
        for read, count in ledger.reads.items()
        if read.phase != TRAIN_AGAIN
    ]


def _runs(per_step: bool) -> str:
    return "once a pass" if per_step else "per microbatch"


def operations(rehearsal: Rehearsal) -> dict[str, float]:
    """Floating-point operations of one microbatch: of this rank, and its share of those that MFU counts."""
    part = rehearsal.part
    ledger = rehearsal.ledger
    counted = ledger.flops(TRAIN_AGAIN) / rehearsal.num_microbatches
    lengths = microbatch_lengths(part.tokens, part.longest, 1)
    shares = part.parallel.tp * part.parallel.pp * part.parallel.cp
    needed = train_flops(part.model, lengths, head=part.head)
    needed += tower_flops(part.model, part.pictures, train=part.learns_to_see)
    return {"counted": counted, "model": needed / shares}


def rehearsal_tables(rehearsal: Rehearsal, planned: Planned) -> Group:
    """The rehearsal as tables for the terminal."""
    ledger = rehearsal.ledger
    parts: list[Any] = [Text(headline(rehearsal), style="bold")]
    parts.append(_shown(MEMORY_HEAD, memory_rows(rehearsal, planned), right=True))
    parts.append(_shown(("largest at the peak of training", "GiB", "blocks", "kind"), _largest(rehearsal)))
    parts.append(_shown((f"{TRAIN_AGAIN}: group", *TRAFFIC_HEAD[1:]), traffic_rows(ledger, TRAIN_AGAIN)))
    parts.append(_shown(READS_HEAD, read_rows(ledger)))
    count = operations(rehearsal)
    parts.append(
        Text(
            f"operations of a microbatch on this rank: {count['counted']:.3e}, recompute included; "
            f"of the model (for MFU), by an even share: {count['model']:.3e}"
        )
    )
    parts += [Text(f"note: {note}") for note in notes(rehearsal, planned)]
    return Group(*parts)


def _largest(rehearsal: Rehearsal) -> list[list[str]]:
    phase = rehearsal.ledger.phases[-1]
    at = rehearsal.ledger.peak(phase).at
    return [
        [f"{operation}, {place}", gib(num_bytes), str(count), kind.value]
        for kind, operation, place, count, num_bytes in rehearsal.ledger.largest(at, LARGEST)
    ]


def _shown(head: Sequence[str], rows: Sequence[Sequence[str]], *, right: bool = False) -> Table:
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for index, name in enumerate(head):
        shown.add_column(name, justify="right" if right and index else "left")
    for row in rows:
        shown.add_row(*row)
    return shown


def rehearsal_page(title: str, results: Sequence[tuple[Rehearsal, Planned]]) -> str:
    """The rehearsals of a run's roles as one HTML page without external resources."""
    sections = [f"<h1>Rehearsal: {text(title)}</h1>"]
    for rehearsal, planned in results:
        ledger = rehearsal.ledger
        samples = ledger.timeline(ledger.phases, SAMPLES)
        series = [
            BarSeries(kind.value, colour, [sample.by_kind[kind] / 2**30 for sample in samples])
            for colour, kind in enumerate(MemoryKind)
        ]
        spans = [
            (phase.name, [i for i, each in enumerate(samples) if each.phase == phase.name]) for phase in ledger.phases
        ]
        where = "; ".join(f"{name}: {places[0]} to {places[-1]}" for name, places in spans if places)
        sections += [
            f"<h2>{text(headline(rehearsal))}</h2>",
            "".join(f"<p>{text(note)}</p>" for note in notes(rehearsal, planned)),
            f'<div class="charts">{stacked_bars("memory over time", "GiB", range(len(samples)), series)}</div>',
            f'<p class="soft">Bars in the order of events. {text(where)}.</p>',
            table(MEMORY_HEAD, memory_rows(rehearsal, planned)),
            table(("largest at the peak of training", "GiB", "blocks", "kind"), _largest(rehearsal)),
        ]
        for phase in (SCORE, TRAIN, TRAIN_AGAIN):
            sections += [f"<h3>Communication: {phase}</h3>", table(TRAFFIC_HEAD, traffic_rows(ledger, phase))]
        sections += ["<h3>Reads of the device by the host</h3>", table(READS_HEAD, read_rows(ledger))]
    return page(f"Rehearsal: {title}", sections)


def rehearsal_values(rehearsal: Rehearsal, planned: Planned) -> dict[str, Any]:
    """The rehearsal as plain values for a JSON file: bytes, seconds and operations as numbers."""
    part = rehearsal.part
    ledger = rehearsal.ledger
    peaks = [ledger.peak(phase) for phase in ledger.phases]
    return {
        "role": part.role,
        "rank": part.rank,
        "stage": Layout.of(part.parallel, part.world_size).coords(part.rank).pp,
        "world_size": part.world_size,
        "layout": str(part.parallel),
        "num_parameters": rehearsal.num_parameters,
        "microbatches": {"rehearsed": rehearsal.num_microbatches, "of": part.num_microbatches, "tokens": part.tokens},
        "peaks": [
            {"phase": peak.phase, "num_bytes": peak.num_bytes, "parts": _by_kind(peak.by_kind)} for peak in peaks
        ],
        "planned": {
            "weights": planned.state.weights,
            "gradients": planned.state.gradients,
            "optimizer": planned.state.optimizer,
            "activations": planned.train.activations + planned.train.logits,
            "working": planned.train.working,
            "over_vocabulary": planned.train.teacher + planned.train.full_kl,
            "peak": planned.peak,
            "difference": planned.peak / peaks[-1].num_bytes - 1,
        },
        "timeline": [
            {"event": sample.at, "phase": sample.phase, **_by_kind(sample.by_kind)}
            for sample in ledger.timeline(ledger.phases, SAMPLES)
        ],
        "communication": [
            {
                "phase": key.phase,
                "group": key.group,
                "ranks": key.size,
                "operation": key.operation,
                "per_step": key.per_step,
                "calls": total.calls,
                "payload_bytes": total.payload,
                "wire_bytes": total.wire,
            }
            for key, total in ledger.traffic.items()
        ],
        "operations": operations(rehearsal),
        "host_reads": [
            {
                "phase": read.phase,
                "place": f"{read.path}:{read.line}",
                "function": read.function,
                "operation": read.operation,
                "per_step": read.per_step,
                "count": count,
                "reason": reason_of(read),
            }
            for read, count in ledger.reads.items()
        ],
        "notes": notes(rehearsal, planned),
        "seconds": rehearsal.seconds,
        "core_seconds": rehearsal.core_seconds,
        "resident_bytes": rehearsal.resident,
    }


def _by_kind(sizes: dict[MemoryKind, int]) -> dict[str, int]:
    return {kind.value: num_bytes for kind, num_bytes in sizes.items()}
