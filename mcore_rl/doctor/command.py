"""``mcore-rl doctor``: what its options mean, the table of all checks, and the order of an examination."""

from __future__ import annotations

import argparse

from rich.console import Console

from mcore_rl.config.cluster import ClusterConfig
from mcore_rl.config.engine import Device
from mcore_rl.config.launch import load_cluster, load_recipe, planned_violations
from mcore_rl.config.names import meant
from mcore_rl.config.offline import OfflineConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.doctor import collectives, compute, engine, layers, memory, recipe, residuals, runs, software
from mcore_rl.doctor.checks import Diagnosis, HealthCheck, Subject, Verdict
from mcore_rl.doctor.examination import examine, examine_nodes, platform_diagnosis
from mcore_rl.doctor.report import highest_residuals, lowest_rates, report_tables, write_report
from mcore_rl.ground.errors import Violation, refuse_if_any

NODES_SHARE = 2 / 3  # of the minutes: for what nodes do by themselves, all at once
LOG_WIDTH = 140  # of the table in a file; a terminal has its own

ALL_CHECKS: tuple[HealthCheck, ...] = (
    *software.CHECKS,
    *compute.CHECKS,
    *memory.CHECKS,
    *residuals.CHECKS,
    *collectives.CHECKS,
    *recipe.CHECKS,
    *layers.CHECKS,
    *engine.CHECKS,
    *runs.CHECKS,
)


def options_problems(options: argparse.Namespace) -> list[Violation]:
    """Every option that contradicts another, or names no check."""
    problems = []
    names = [check.name for check in ALL_CHECKS]
    for name in options.only or []:
        if name not in names:
            remedy = meant(name, names, "mcore-rl doctor --list shows them")
            problems.append(Violation("--only", name, "there is no such check", remedy))
    if options.nodes < 1:
        problems.append(Violation("--nodes", options.nodes, "must be positive", "Write 1 or more"))
    if options.nodes > 1 and not options.address:
        remedy = "Start Ray on them (docs/ray.md) and write --address HOST:PORT; a Slurm job does: cluster.slurm.doctor"
        problems.append(Violation("--nodes", options.nodes, "needs a Ray cluster over the nodes", remedy))
    if options.words and not (options.cluster or options.recipe):
        remedy = "Write cluster=NAME too"
        problems.append(Violation(options.words[0], "", "changes a cluster, and none is named", remedy))
    for text in options.words:
        if not text.startswith("cluster.") or "=" not in text:
            problems.append(Violation(text, "", "is no override", "Write cluster=NAME or cluster.KEY=VALUE"))
    return problems


def _planned(options: argparse.Namespace) -> tuple[RunConfig | OfflineConfig | None, ClusterConfig | None]:
    """The recipe and the cluster that were named; a recipe names its own cluster."""
    run = load_recipe(options.recipe) if options.recipe else None
    refuse_if_any([] if run is None else planned_violations(run))
    name = options.cluster or (run.recipe.cluster if run is not None else "")
    overrides = [text.removeprefix("cluster.") for text in options.words]
    return run, load_cluster(name, overrides) if name else None


def run_doctor(options: argparse.Namespace) -> int:
    """Examines, prints and writes the report.  Returns 1 if a check failed, else 0."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=LOG_WIDTH)
    if options.list:
        for check in ALL_CHECKS:
            needs = f" (needs {', '.join(need.name for need in check.needs)})" if check.needs else ""
            console.print(f"{check.name}: {check.about}{needs}", markup=False, highlight=False, soft_wrap=True)
        return 0
    refuse_if_any(options_problems(options))
    run, cluster = _planned(options)
    device = Device(options.device) if options.device else cluster.device if cluster else Device.auto
    platform, first = platform_diagnosis(device)
    directory = options.out.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    subject = Subject(
        platform=platform,
        directory=directory,
        cluster=cluster,
        recipe=run,
        num_nodes=options.nodes,
        address=options.address,
        quick=options.quick,
    )
    diagnoses = [first, *([] if first.verdict is Verdict.FAIL else _examined(options, subject))]
    path = write_report(diagnoses, subject)
    console.print(report_tables(diagnoses))
    plannable = lowest_rates(diagnoses) or highest_residuals(diagnoses)
    more = f": plan with it by cluster.measured={path}" if plannable else ""
    console.print(f"{path}{more}", markup=False, highlight=False, soft_wrap=True)
    return 1 if any(each.verdict is Verdict.FAIL for each in diagnoses) else 0


def _examined(options: argparse.Namespace, subject: Subject) -> list[Diagnosis]:
    """What all chosen checks say, those of single nodes first."""
    checks = [check for check in ALL_CHECKS if not options.only or check.name in options.only]
    seconds = 60.0 * options.minutes
    console = Console(stderr=True, emoji=False)
    with console.status("doctor") as status:

        def watch(name: str) -> None:
            status.update(f"doctor: {name}")
            if not console.is_terminal:
                console.print(f"doctor: {name} ...", markup=False, highlight=False, soft_wrap=True)

        if subject.num_nodes == 1:
            return examine(checks, subject, seconds, watch)
        watch(f"{subject.num_nodes} nodes, each by itself")
        diagnoses = examine_nodes(checks, subject, NODES_SHARE * seconds)
        over = [check for check in checks if not check.on_each_node]
        return diagnoses + examine(over, subject, (1 - NODES_SHARE) * seconds, watch)
