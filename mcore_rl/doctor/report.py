"""The report of an examination: a table for the terminal, and ``doctor.json`` for programs (``config/launch.py``)."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

import mcore_rl
from mcore_rl.config.cluster import ResidualMemory
from mcore_rl.config.launch import FORMAT, RATES_KEY, RESIDUALS_KEY, VERSION
from mcore_rl.doctor.checks import SEVERITY, Diagnosis, Subject, Verdict, worst
from mcore_rl.tracking.atomic import replaced

STYLES = {Verdict.PASS: "green", Verdict.WARN: "yellow", Verdict.FAIL: "bold red", Verdict.SKIP: "dim"}
# The planner's rate -> the numbers of which it is the lowest, over all nodes.
RATES = {
    "intra_node_gb_s": ("all_reduce_intra_node_gb_s", "all_to_all_intra_node_gb_s"),
    "inter_node_gb_s": ("all_reduce_inter_node_gb_s", "all_to_all_inter_node_gb_s"),
    "host_link_gb_s": ("host_to_device_gb_s", "device_to_host_gb_s"),
}
# The planner's memory of processes (``config/cluster.py``, ``ResidualMemory``): the highest over all nodes.
RESIDUAL_NAMES = tuple(field.name for field in fields(ResidualMemory))
FILE = "doctor.json"


def by_check(diagnoses: Sequence[Diagnosis]) -> list[tuple[Diagnosis, list[Diagnosis]]]:
    """(the worst, all) of the diagnoses of each name, in the order in which the names first come."""
    rows: dict[str, list[Diagnosis]] = {}
    for each in diagnoses:
        rows.setdefault(each.check, []).append(each)
    return [(max(said, key=lambda each: SEVERITY.index(each.verdict)), said) for said in rows.values()]


def report_tables(diagnoses: Sequence[Diagnosis]) -> Group:
    """The table, a row for each name; of several nodes the worst one's, with its name.  Then the summary.

    Checks that were left out for one reason share a row.
    """
    table = Table(show_edge=False, pad_edge=False, header_style="bold")
    table.add_column("")
    table.add_column("check", no_wrap=True)
    table.add_column("measured, and what to do", overflow="fold", ratio=3)
    table.add_column("expected", overflow="fold", ratio=2)
    rows = by_check(diagnoses)
    for shown, said in rows:
        if shown.verdict is Verdict.SKIP:
            continue
        measured = Text(_where(shown, said) + shown.measured)
        if shown.remedy:
            measured.append(f"\n-> {shown.remedy}", style="italic")
        style = STYLES[shown.verdict]
        table.add_row(Text(shown.verdict.value, style=style), Text(shown.check), measured, Text(shown.expected))
    for why, names in _skipped([shown for shown, _ in rows]).items():
        table.add_row(Text(Verdict.SKIP.value, style=STYLES[Verdict.SKIP]), Text(why), Text(", ".join(names)), "")
    return Group(table, Text(summary(diagnoses), style=STYLES[worst([each.verdict for each in diagnoses])]))


def _skipped(shown: Sequence[Diagnosis]) -> dict[str, list[str]]:
    """Why checks were left out -> their names."""
    names: dict[str, list[str]] = {}
    for each in shown:
        if each.verdict is Verdict.SKIP:
            names.setdefault(each.measured, []).append(each.check)
    return names


def _where(shown: Diagnosis, said: Sequence[Diagnosis]) -> str:
    if len(said) < 2:
        return ""
    alike = sum(each.verdict is shown.verdict for each in said)
    return f"{shown.node}{'' if alike == 1 else f' and {alike - 1} more'} of {len(said)} nodes: "


def summary(diagnoses: Sequence[Diagnosis]) -> str:
    """One line: the worst verdict, how many of each, and the names of what failed."""
    rows = by_check(diagnoses)
    counts = Counter(shown.verdict for shown, _ in rows)
    words = ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in reversed(SEVERITY) if counts[verdict])
    failed = [shown.check for shown, _ in rows if shown.verdict is Verdict.FAIL]
    end = f": mend {', '.join(failed)} before you start a run" if failed else ""
    return f"{worst([shown.verdict for shown, _ in rows]).value}: {words}{end}"


def lowest_rates(diagnoses: Sequence[Diagnosis]) -> dict[str, float]:
    """The planner's rates (``config/cluster.py``, ``ReachedRates``), as far as they were measured."""
    rates = {}
    for rate, names in RATES.items():
        values = [each.numbers[name] for each in diagnoses for name in names if name in each.numbers]
        if values:
            rates[rate] = round(min(values), 4)
    return rates


def highest_residuals(diagnoses: Sequence[Diagnosis]) -> dict[str, float]:
    """The planner's memory of processes, as far as it was measured."""
    values = {name: [each.numbers[name] for each in diagnoses if name in each.numbers] for name in RESIDUAL_NAMES}
    return {name: max(measured) for name, measured in values.items() if measured}


def report_values(diagnoses: Sequence[Diagnosis], subject: Subject) -> dict[str, Any]:
    """What ``doctor.json`` holds."""
    platform = subject.platform
    return {
        "format": FORMAT,
        "version": VERSION,
        "mcore_rl": mcore_rl.__version__,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "verdict": worst([each.verdict for each in diagnoses]).value,
        "device": platform.kind.value,
        "device_name": platform.device_name,
        "num_devices": platform.num_devices,
        "num_nodes": subject.num_nodes,
        "cluster": subject.cluster.name if subject.cluster else "",
        "quick": subject.quick,
        RATES_KEY: lowest_rates(diagnoses),
        RESIDUALS_KEY: highest_residuals(diagnoses),
        "diagnoses": [_values(each) for each in diagnoses],
    }


def _values(diagnosis: Diagnosis) -> dict[str, Any]:
    numbers: Mapping[str, float] = diagnosis.numbers
    finite = {name: value for name, value in numbers.items() if math.isfinite(value)}  # JSON has no other
    return asdict(diagnosis) | {"verdict": diagnosis.verdict.value, "numbers": finite}


def write_report(diagnoses: Sequence[Diagnosis], subject: Subject) -> Path:
    """Writes ``doctor.json`` into the subject's directory, and returns its path."""
    path = subject.directory / FILE
    with replaced(path) as new:
        new.write_text(json.dumps(report_values(diagnoses, subject), indent=2) + "\n", encoding="utf-8")
    return path
