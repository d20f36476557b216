"""Seconds and memory of the copy plan at DeepSeek-V3's size, and of the proof of Mixtral-8x22B on 64 ranks.

    python benchmarks/reshard.py [--json results.json]

The plan: from 512 training ranks to 256 rollout ranks, with whole experts spread over all ranks and with every expert
cut over 16.  The proof: tools/verify_conversion.py's, with real Megatron modules of every rank and the index tracer.
Each runs in a process of its own, on one core, whose peak resident memory is counted with everything it imports.

Targets: a plan in at most 60 s and 4 GiB; the proof in at most 60 s; plan bytes over the lower bound exactly 1.00, no
training rank beyond its share of what it has in common with others by more than one tensor, and everything proven.
Exits with 1 where one is missed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table as Lines

from mcore_rl.config.parallel import parse_layout
from mcore_rl.config.rollout import parse_rollout_layout
from mcore_rl.families.checkpoints import find_checkpoint, published_config
from mcore_rl.families.registry import model_of
from mcore_rl.parallel.layout import balanced_layers
from mcore_rl.proofs.reshard_proof import reshard_failures, traffic
from mcore_rl.proofs.tracer import trace
from mcore_rl.proofs.verify import verify
from mcore_rl.weights.reshard import plan_reshard
from mcore_rl.weights.rollout_table import RolloutTable
from mcore_rl.weights.table import Table

MODEL_CONFIGS = Path(__file__).resolve().parents[1] / "model_configs"
MAX_SECONDS = 60.0
MAX_GIB = 4.0
PLANS = (
    ("deepseek-v3", "tp=8,pp=16,ep=32", 512, "tp=8,dp=32,ep=256"),
    ("deepseek-v3", "tp=8,pp=8,ep=64", 512, "tp=8,dp=32,ep=256"),
    ("deepseek-v3", "tp=8,pp=16,ep=32", 512, "tp=16,dp=16"),
)
PROOF = ("mixtral-8x22b", "tp=8,pp=4,ep=8", 64, "tp=8")


@dataclass(frozen=True, kw_only=True)
class Result:
    """One measurement.  failures: of the proof of what was made, which is not part of a plan's seconds."""

    what: str
    copies: int
    seconds: float
    peak_gib: float
    over_bound: float
    failures: int

    @property
    def kept(self) -> bool:
        """Whether every target is met."""
        in_bounds = self.seconds <= MAX_SECONDS and self.peak_gib <= MAX_GIB
        return in_bounds and self.over_bound == 1.0 and not self.failures


def tables(name: str, training: str, world_size: int, rollout: str) -> tuple[Table, RolloutTable]:
    """Both tables of a checkpoint of model_configs/."""
    family, model = model_of(published_config(find_checkpoint(name, MODEL_CONFIGS), MODEL_CONFIGS))
    parallel = parse_layout(training)
    if model.num_layers % (parallel.pp * parallel.vpp):
        parallel.pipeline_layers = balanced_layers(model.num_layers, parallel.pp * parallel.vpp)
    table = Table(family, model, parallel, world_size)
    return table, RolloutTable(family, model, parse_rollout_layout(rollout))


def peak_gib() -> float:
    """Of this process, so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def measure_plan(name: str, training: str, world_size: int, rollout: str) -> Result:
    """Make a plan, then prove it."""
    begin = time.perf_counter()
    table, target = tables(name, training, world_size, rollout)
    plan = plan_reshard(table, target)
    seconds = time.perf_counter() - begin
    peak = peak_gib()
    what = f"plan {name} {training} on {world_size} to {rollout}"
    num_failures = len(reshard_failures(plan))
    bound = traffic(plan).over_bound
    return Result(what=what, copies=len(plan), seconds=seconds, peak_gib=peak, over_bound=bound, failures=num_failures)


def measure_proof(name: str, training: str, world_size: int, rollout: str) -> Result:
    """Prove a model with the modules of every rank; Megatron's import counts."""
    begin = time.perf_counter()
    warnings.simplefilter("ignore")  # what Megatron would like to be installed
    from mcore_rl.training.meta import meta_rank

    table, target = tables(name, training, world_size, rollout)
    report = verify(table, target, lambda rank: meta_rank(table.model, table.parallel, world_size, rank))
    config = published_config(find_checkpoint(name, MODEL_CONFIGS), MODEL_CONFIGS)
    _, traced = trace(config, table.parallel, world_size, target.layout)
    assert report.traffic is not None
    return Result(
        what=f"proof {name} {training} on {world_size} to {rollout}",
        copies=len(plan_reshard(table, target)),
        seconds=time.perf_counter() - begin,
        peak_gib=peak_gib(),
        over_bound=report.traffic.over_bound,
        failures=len(traced) + sum(len(check.failures) for check in report.checks),
    )


def alone(measure: Callable[..., Result], arguments: tuple[str, str, int, str]) -> Result:
    """Run ``measure`` in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, *arguments).result()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the results there")
    arguments = parser.parse_args()
    console = Console()
    results = [*(alone(measure_plan, case) for case in PLANS), alone(measure_proof, PROOF)]
    lines = Lines("", "copies", "s", "peak GiB", "bytes over bound", "failures", "")
    for result in results:
        met = "[green]met[/green]" if result.kept else "[red]missed[/red]"
        row = (result.what, f"{result.copies:,}", f"{result.seconds:.1f}", f"{result.peak_gib:.2f}")
        lines.add_row(*row, f"{result.over_bound:.2f}", str(result.failures), met)
    console.print(lines)
    console.print(f"targets: at most {MAX_SECONDS:.0f} s and {MAX_GIB:.0f} GiB, 1.00 of the bound, nothing unproven")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")
    return 0 if all(result.kept for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
