"""What one GPU can tell: a table and a JSON file of facts, in ten minutes at most, each section in its own process.

    python -m benchmarks.gpu [--json gpu_facts.json] [--table gpu_facts.md] [--only step_dense ...]
    python -m benchmarks.gpu --device cpu --tiny       # the same code on the CPU, for a test

It needs torch 2.11 or newer, megatron-core and what docs/gpu_facts.md names; a section that lacks something is skipped
and says why.  A section that fails, dies or takes too long is reported with what it had measured by then, and the
others go on.  The files are written after every section, so that a run that is cut off leaves what it has.

Exits with 1 where a section failed or a fact shows that something does not work, with 2 where there is no accelerator.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from mcore_rl.config.engine import Device
from mcore_rl.parallel.cpu import UNCOMPILED
from mcore_rl.parallel.launch import FRESH, ProcessContext, inherited_environment, run_ranks

ROOT = str(Path(__file__).parents[1])
SECTIONS = "benchmarks.gpu_sections"
LIMIT_S = 570.0  # of all; a command on a borrowed machine often has ten minutes
WRITE_S = 15.0  # before LIMIT_S no section is started that could take longer
ERROR_CHARACTERS = 6_000
NO_TIME = "no time was left for it"


@dataclass(frozen=True)
class Section:
    """One process that measures something.

    name: on the command line.  function: ``module:name`` in ``package``.  limit_s: that it may take.  least_s: with
    less time than this it is not started.
    """

    name: str
    function: str
    limit_s: float
    package: str = SECTIONS
    least_s: float = 0.0

    @property
    def module(self) -> str:
        """The module of its function."""
        return f"{self.package}.{self.function.partition(':')[0]}"


PLAN = (
    Section("machine", "machine:facts", 60),
    Section("compiler", "machine:compiler", 90),
    Section("attention", "attention:facts", 60),
    Section("logprobs", "token_logprobs:facts", 60),
    Section("fused", "fused:facts", 90),
    Section("ipc", "device_ipc:facts", 120),
    Section("copies", "copies:facts", 60),
    Section("step_dense", "steps:dense", 120),
    Section("step_moe", "steps:moe", 120),
    Section("profile", "profile:facts", 120),
    Section("parity_float32", "parity:float32", 120),
    Section("parity_bfloat16", "parity:bfloat16", 120),
    Section("moves", "moves:facts", 90),
    Section("step_dense_recomputed", "steps:dense_recomputed", 90),
    Section("tests", "gpu_tests:facts", 300),
)
COMPILER = "compiler"


@dataclass
class Outcome:
    """What became of a section.  status: ok, wrong (a fact says so), skipped, failed.  why: it was not ok."""

    name: str
    status: str
    seconds: float
    why: str = ""
    facts: list[dict[str, Any]] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether nothing went wrong in it."""
        return self.status in ("ok", "skipped")


def run_section(
    section: Section, options: argparse.Namespace, context: ProcessContext, limit_s: float, folder: Path
) -> Outcome:
    """One section in a fresh process, which is ended after ``limit_s``.  folder: where sections leave files."""
    began = time.monotonic()
    path = folder / f"{section.name}.facts.jsonl"
    path.write_bytes(b"")
    arguments = (f"{section.package}.{section.function}", options.device, options.tiny, began + limit_s, str(path))
    error = ""
    try:
        run_ranks(enter, 1, arguments, timeout_s=limit_s, context=context)
    except Exception as problem:  # noqa: BLE001  # of whatever kind: the other sections go on
        error = f"{type(problem).__name__}: {problem}"[-ERROR_CHARACTERS:]
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    facts = [line for line in lines if "skipped" not in line]
    outcome = Outcome(section.name, "ok", round(time.monotonic() - began, 1), facts=facts)
    if error:
        outcome.status = "failed"
        outcome.why = error
    elif skipped := [line["skipped"] for line in lines if "skipped" in line]:
        outcome.status = "skipped"
        outcome.why = skipped[0]
    elif wrong := [str(fact["what"]) for fact in facts if not fact["ok"]]:
        outcome.status = "wrong"
        outcome.why = "; ".join(wrong)
    return outcome


def enter(*arguments: Any) -> None:
    """The process of a section; imported there, since what it imports is what may fail."""
    from benchmarks.gpu_sections.section import enter as entered

    entered(*arguments)


def number(value: float | str) -> str:
    """Four digits of a number; a word as it is."""
    return value if isinstance(value, str) else f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def table(outcomes: Sequence[Outcome]) -> str:
    """One row a fact, after one a section, in Markdown."""
    rows = [("section", "what", "measured", "unit", "beside it")]
    for outcome in outcomes:
        why = outcome.why.splitlines()[0][:300] if outcome.why else ""
        rows.append((f"**{outcome.name}**", f"{outcome.seconds:g} s", outcome.status.upper(), "", why))
        rows += [("", fact["what"], number(fact["value"]), fact["unit"], fact["beside"]) for fact in outcome.facts]
    cells = [[cell.replace("|", "/").replace("\n", " ") for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(rows[0]) - 1)]
    lines = ["| " + " | ".join([*map(str.ljust, row[:-1], widths), row[-1]]) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "|".join("---" for _ in rows[0]) + "|", *lines[1:]]) + "\n"


class Report:
    """The two files, written anew after every section and by the clock at the end."""

    def __init__(self, options: argparse.Namespace, names: Iterable[str]) -> None:
        self._options = options
        self._names = list(names)
        self._began = time.time()
        self.outcomes: list[Outcome] = []

    def write(self) -> None:
        """Both files, by way of a temporary name."""
        left = self._names[len(self.outcomes) :]
        outcomes = [*self.outcomes, *(Outcome(name, "skipped", 0.0, NO_TIME) for name in left)]
        record = {
            "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._began)),
            "seconds": round(time.time() - self._began, 1),
            "device": self._options.device,
            "tiny": self._options.tiny,
            "sections": [asdict(outcome) for outcome in outcomes],
        }
        written = {self._options.json: json.dumps(record, indent=1) + "\n", self._options.table: table(outcomes)}
        for path, text in written.items():
            new = path.with_name(path.name + ".new")
            new.write_text(text, encoding="utf-8")
            new.replace(path)

    def out_of_time(self) -> None:
        """Leave at once: a process that hangs in a driver cannot even be killed."""
        self.write()
        print(f"{table(self.outcomes)}\nOUT OF TIME after {self._options.limit_s:.0f} s", flush=True)
        os._exit(1)


def context_for(options: argparse.Namespace, plan: Sequence[Section]) -> ProcessContext:
    """How processes start: fresh; or, in a test on the CPU, forked from one that has imported everything once."""
    if not options.tiny:
        return FRESH
    context = multiprocessing.get_context("forkserver")
    modules = {section.module for section in plan}
    if f"{SECTIONS}.parity" in modules:  # which imports this only where it finds transformers
        modules.add("tests.support.engine_parity")
    context.set_forkserver_preload(sorted(modules))
    return context


def environment_of(options: argparse.Namespace, outcomes: Sequence[Outcome]) -> Mapping[str, str | None]:
    """Of the next section: without the compiler where that was seen to fail, so that the rest can be measured."""
    one_thread = {"OMP_NUM_THREADS": "1"} if options.tiny else {}  # a server that forks must have one thread
    broken = any(outcome.name == COMPILER and not outcome.passed for outcome in outcomes)
    return (
        (UNCOMPILED if broken or options.tiny else {}) | one_thread | {"PYTHONPATH": os.pathsep.join([ROOT, *sys.path])}
    )


def main(arguments: Sequence[str] | None = None, plan: Sequence[Section] = PLAN) -> int:
    """Exit status: see ``run_plan``."""
    options = parse_options(arguments, [section.name for section in plan])
    with tempfile.TemporaryDirectory() as folder:
        return run_plan(options, plan, Path(folder))


def run_plan(
    options: argparse.Namespace,
    plan: Sequence[Section],
    folder: Path,
    *,
    lends_time: bool = False,
    report_type: type[Report] = Report,
) -> int:
    """Run the sections that ``options`` choose, one after the other.

    folder: where sections leave files that later ones read.  lends_time: a section may take, beyond its own limit, what
    those before it have left of theirs.
    Exit status: 0; 1 where something failed, is wrong or had no time; 2 where there is nothing to measure.
    """
    if options.device != Device.cpu.value and not torch.accelerator.is_available():
        print(f"torch {torch.__version__} sees no accelerator; --device cpu --tiny runs the same code on the CPU")
        return 2
    chosen = [section for section in plan if not options.only or section.name in options.only]
    report = report_type(options, [section.name for section in chosen])
    deadline = time.monotonic() + options.limit_s
    clock = threading.Timer(options.limit_s, report.out_of_time)
    clock.daemon = True
    clock.start()
    context = context_for(options, chosen)
    unspent_s = 0.0
    all_ran = True
    for section in chosen:
        limit_s = min(section.limit_s + unspent_s, deadline - time.monotonic() - WRITE_S)
        if limit_s <= section.least_s:
            needed = f": {max(0.0, limit_s):.0f} s, of {section.least_s:.0f} at least" if section.least_s else ""
            report.outcomes.append(Outcome(section.name, "skipped", 0.0, NO_TIME + needed))
            all_ran = False
            continue
        print(f"== {section.name}, at most {limit_s:.0f} s", flush=True)
        with inherited_environment(environment_of(options, report.outcomes)):
            outcome = run_section(section, options, context, limit_s, folder)
        report.outcomes.append(outcome)
        if lends_time:
            unspent_s = max(0.0, unspent_s + section.limit_s - outcome.seconds)
        print(f"== {outcome.name}: {outcome.status} in {outcome.seconds:g} s {outcome.why}", flush=True)
        report.write()
    clock.cancel()
    report.write()
    print(options.table.read_text(encoding="utf-8"))
    return 0 if all_ran and all(outcome.passed for outcome in report.outcomes) else 1


def add_options(parser: argparse.ArgumentParser, names: Sequence[str], limit_s: float) -> None:
    """The options of whatever runs sections.  limit_s: of all of them, the default."""
    parser.add_argument("--device", choices=[device.value for device in Device], default=Device.auto.value)
    parser.add_argument("--tiny", action="store_true", help="sizes for a test on the CPU")
    parser.add_argument("--only", nargs="+", choices=names, metavar="SECTION", help=", ".join(names))
    parser.add_argument("--limit-s", type=float, default=limit_s, help="of all sections (default: %(default)g)")


def parse_options(arguments: Sequence[str] | None, names: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="what one GPU can tell, in one table and one JSON file")
    add_options(parser, names, LIMIT_S)
    parser.add_argument("--json", type=Path, default=Path("gpu_facts.json"), help="default: %(default)s")
    parser.add_argument("--table", type=Path, default=Path("gpu_facts.md"), help="default: %(default)s")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
